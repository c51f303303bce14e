"""Inductor below the graph: its schedule, memory estimate, partitions and generated code.

Source: torch/_inductor/scheduler.py (`Scheduler.codegen`, `graph_partition`, `should_partition`),
torch/_inductor/memory.py (`estimate_peak_memory`, `get_freeable_input_buf`),
torch/_inductor/graph.py (`GraphLowering.codegen`), torch/_inductor/async_compile.py (`AsyncCompile.cpp_pybinding`),
torch/_inductor/cpu_vec_isa.py, torch/_inductor/codegen/wrapper_fxir.py and codegen/common.py
(`register_backend_for_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch.fx import GraphModule

from workbench.torch_api.inductor import kernels
from workbench.torch_api.inductor.lowering import visible_outputs

# For a few small kernels: no pool of processes, and no precompiled headers.
_PLAIN = {"compile_threads": 1, "cpp_cache_precompile_headers": False}


@dataclass(frozen=True)
class Part:
    """A part of the schedule. recorded: whether it can become a CUDA graph. why_not: the distinct reasons if not."""

    steps: tuple[str, ...]
    recorded: bool
    why_not: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """One graph that Inductor lowered.

    steps: the scheduler's nodes in order; a fused node joins the names of its parts. estimate: Inductor's estimate of
    the peak memory in bytes. It assumes no in-place kernels, takes a size known only at run time as 0, and counts only
    the inputs that a backward may free. sizes: bytes of each buffer, None if known only at run time. parts: empty if
    Inductor's options ask for no partition.
    """

    steps: tuple[str, ...]
    estimate: int
    sizes: dict[str, int | None]
    parts: tuple[Part, ...]
    code: str


@contextmanager
def watched() -> Iterator[list[Lowered]]:
    """Inside, each graph that Inductor lowers, through any entry point, is added to the list. Caches are off."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler

    lowerings: list[Lowered] = []
    open_graphs: list[dict[str, Any]] = []
    codegen, cut, lower = Scheduler.codegen, Scheduler.graph_partition, GraphLowering.codegen

    def scheduled(self: Any) -> Any:
        if open_graphs:
            open_graphs[-1] |= {
                "steps": tuple(n.get_name() for n in self.nodes),
                "estimate": _estimate(self),
            }
        result = codegen(self)
        if open_graphs:
            open_graphs[-1]["sizes"] = {
                name: _size(buffer.node) for name, buffer in self.name_to_buf.items()
            }
        return result

    def parted(self: Any) -> Any:
        result = cut(self)
        if open_graphs:
            open_graphs[-1]["parts"] = tuple(
                Part(
                    tuple(n.get_name() for n in nodes),
                    not signature.skip_cudagraph,
                    tuple(
                        dict.fromkeys(str(why) for n in nodes if (why := self.should_partition(n)))
                    ),
                )
                for nodes, signature in zip(*result, strict=True)
            )
        return result

    def lowered(self: Any) -> Any:
        open_graphs.append({"steps": (), "estimate": 0, "sizes": {}, "parts": ()})
        try:
            result = lower(self)
            lowerings.append(Lowered(**open_graphs[-1], code=_text(result[0])))
        finally:
            open_graphs.pop()
        return result

    with (
        torch._inductor.config.patch({"force_disable_caches": True}),
        patch.object(Scheduler, "codegen", scheduled),
        patch.object(Scheduler, "graph_partition", parted),
        patch.object(GraphLowering, "codegen", lowered),
    ):
        yield lowerings


def _estimate(scheduler: Any) -> int:
    from torch._inductor import memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    # only reorder_for_peak_memory fills these in otherwise
    memory.assign_memory_planning_info_for_scheduler_buffers(scheduler.nodes, scheduler.name_to_buf)
    inputs, outputs = OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names())
    freeable = memory.get_freeable_input_buf(scheduler.nodes, inputs)
    return int(memory.estimate_peak_memory(scheduler.nodes, freeable, outputs)[0])


def _size(buffer: Any) -> int | None:
    """Bytes; 0 for a buffer without a tensor, None where the number of elements is a symbol."""
    try:
        return int(buffer.get_numel()) * buffer.get_dtype().itemsize
    except TypeError:  # a symbol is no int
        return None
    except (AttributeError, NotImplementedError):  # a layout without a shape
        return 0


def _text(written: Any) -> str:
    """The Python code of the wrapper, or of its FX graph."""
    return str(written.value) if hasattr(written, "value") else str(written.gm.code)


@contextmanager
def _compiled_when_called() -> Iterator[None]:
    """Inside, C++ kernels are written without vector instructions, and compiled by their first call."""
    import torch._inductor.cpu_vec_isa as vectors
    from torch._inductor.async_compile import AsyncCompile

    compile_now = AsyncCompile.cpp_pybinding

    def later(self: Any, *args: Any) -> Callable[..., Any]:
        @cache
        def compiled() -> Callable[..., Any]:
            with without_vectors(), torch._inductor.config.patch(_PLAIN):
                future: Any = compile_now(self, *args)
                return future.result() if hasattr(future, "result") else future

        return lambda *inputs: compiled()(*inputs)

    def without_vectors() -> Any:
        return patch.object(vectors, "valid_vec_isa_list", list)  # detecting them compiles programs

    with patch.object(AsyncCompile, "cpp_pybinding", later), without_vectors():
        yield


@contextmanager
def _wrapper_goes_to(
    device: str, receive: Callable[[GraphModule], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, the device has a backend that takes the wrapper as an FX graph, registered like an out-of-tree one."""
    from torch._inductor.codegen import common
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    class Received(WrapperFxCodegen):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            return receive(gm)

    common.init_backend_registration()
    known = common.device_codegens[device]
    tables = (
        common.device_codegens,
        common.custom_backend_passes,
        common.custom_backend_codegen_configs,
    )
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(patch.dict(table))
        common.register_backend_for_device(
            device, known.scheduling, known.wrapper_codegen, None, Received
        )
        yield


def lower(
    graph: GraphModule,
    example_inputs: list[Any],
    config: dict[str, Any],
    receive: Callable[[GraphModule], Callable[..., Any]] | None = None,
) -> tuple[Any, Lowered]:
    """Lower one forward graph for inference. Returns Inductor's boxed callable, which builds C++ on use, and a record.

    receive: gets the wrapper as an FX graph, and returns the function to call in its place.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = visible_outputs(graph, len(output.args[0]))  # type: ignore[arg-type]
    keywords: dict[str, Any] = {"is_inference": True, "static_input_idxs": []}
    with ExitStack() as stack:
        if receive is not None:
            devices = {v.device.type for v in example_inputs if isinstance(v, torch.Tensor)}
            stack.enter_context(_wrapper_goes_to(devices.pop(), receive))
            # in one process: the wrapper does not get the source of a Triton kernel that a worker compiled
            config = {**config, "fx_wrapper": True, "compile_threads": 1}
            keywords["fx_wrapper"] = True
        stack.enter_context(torch._inductor.config.patch(config))
        lowerings = stack.enter_context(watched())
        stack.enter_context(_compiled_when_called())
        stack.enter_context(kernels.watched())
        compiled = compile_fx_inner(graph, example_inputs, **keywords)
    return compiled, lowerings[-1]


def name_inputs(graph: GraphModule) -> dict[str, str]:
    """Name the inputs `arg0_1`, `arg1_1`, ... as AOTAutograd does for inference. Returns the old name by new name.

    Inductor goes by names: it may free the memory of an input with any other name (`is_nonfreeable_buffers`).
    """
    named = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        named[f"arg{i}_1"] = node.name
        node.name = node.target = (
            f"arg{i}_1"  # as torch.export does: torch.fx would avoid a used name
        )
    graph.recompile()
    return named


def mark_fallback(node: torch.fx.Node) -> None:
    """Let Inductor call the eager operator for this node, without fusion."""
    node.meta["should_fallback"] = True
