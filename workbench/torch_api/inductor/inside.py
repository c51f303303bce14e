"""What Inductor does below the graph: its schedule, its estimate of memory, its partitions, the code that it writes.

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
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch.fx import GraphModule

from workbench.torch_api.inductor import kernels
from workbench.torch_api.inductor.lowering import visible_outputs

# For the few small kernels that are run at all: no pool of processes, and no headers compiled ahead.
_PLAIN = {"compile_threads": 1, "cpp_cache_precompile_headers": False}


@dataclass(frozen=True)
class Part:
    """A stretch of the schedule. recorded: it may become one CUDA graph; why_not: each reason once, else empty."""

    steps: tuple[str, ...]
    recorded: bool
    why_not: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Lowered:
    """One graph that Inductor lowered.

    steps: the scheduler's nodes in their order; a fused one joins the names of its parts. estimate: bytes alive at the
    peak as Inductor estimates them: no kernel writes over its input, a size that is known in a run only is 0, and of
    inputs only what a backward may free counts. sizes: bytes of each buffer; None where a run decides. parts: empty
    where Inductor cuts nothing by its options.
    """

    steps: tuple[str, ...]
    estimate: int
    sizes: dict[str, int | None]
    parts: tuple[Part, ...]
    code: str

    @property
    def generated(self) -> tuple[str, ...]:
        """The kernels that the code defines, by name; a user's own Triton kernels are among them."""
        return tuple(kernels.sources(self.code))


@contextmanager
def watched() -> Iterator[list[Lowered]]:
    """Inside, what Inductor lowers is added to the list, by whatever route it is asked. Caches are off."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import Scheduler

    found: list[Lowered] = []
    open_graphs: list[dict[str, Any]] = []
    codegen, cut, lower = Scheduler.codegen, Scheduler.graph_partition, GraphLowering.codegen

    def scheduled(self: Any) -> Any:
        if open_graphs:
            open_graphs[-1] |= {"steps": tuple(n.get_name() for n in self.nodes), "estimate": _estimate(self)}
        result = codegen(self)
        if open_graphs:
            open_graphs[-1]["sizes"] = {name: _size(buffer.node) for name, buffer in self.name_to_buf.items()}
        return result

    def parted(self: Any) -> Any:
        result = cut(self)
        if open_graphs:
            open_graphs[-1]["parts"] = tuple(
                Part(tuple(n.get_name() for n in nodes), not signature.skip_cudagraph,
                     tuple(dict.fromkeys(str(why) for n in nodes if (why := self.should_partition(n)))),
                     len(signature.input_nodes), len(signature.output_nodes))
                for nodes, signature in zip(*result, strict=True))
        return result

    def lowered(self: Any) -> Any:
        open_graphs.append({"steps": (), "estimate": 0, "sizes": {}, "parts": ()})
        try:
            result = lower(self)
            found.append(Lowered(**open_graphs[-1], code=_text(result[0])))
        finally:
            open_graphs.pop()
        return result

    with (torch._inductor.config.patch({"force_disable_caches": True}),
          patch.object(Scheduler, "codegen", scheduled), patch.object(Scheduler, "graph_partition", parted),
          patch.object(GraphLowering, "codegen", lowered)):
        yield found


def _estimate(scheduler: Any) -> int:
    from torch._inductor import memory
    from torch._inductor.virtualized import V
    from torch.utils._ordered_set import OrderedSet

    # without reorder_for_peak_memory nobody has filled these in
    memory.assign_memory_planning_info_for_scheduler_buffers(scheduler.nodes, scheduler.name_to_buf)
    inputs, outputs = OrderedSet(V.graph.graph_inputs), OrderedSet(V.graph.get_output_names())
    freeable = memory.get_freeable_input_buf(scheduler.nodes, inputs)
    return int(memory.estimate_peak_memory(scheduler.nodes, freeable, outputs)[0])


def _size(buffer: Any) -> int | None:
    """Bytes; 0 for what holds no tensor of its own, None where the number of elements is a symbol."""
    try:
        return int(buffer.get_numel()) * buffer.get_dtype().itemsize
    except TypeError:  # a symbol is no int
        return None
    except (AttributeError, NotImplementedError):  # a layout without a shape
        return 0


def _text(written: Any) -> str:
    """The Python of the wrapper, or of the FX graph that stands for it."""
    return str(written.value) if hasattr(written, "value") else str(written.gm.code)


@contextmanager
def _compiled_when_called() -> Iterator[None]:
    """C++ kernels are written without vector instructions, and compiled by their first call."""
    import torch._inductor.cpu_vec_isa as vectors
    from torch._inductor.async_compile import AsyncCompile

    compile_now = AsyncCompile.cpp_pybinding

    def later(self: Any, *args: Any) -> Callable[..., Any]:
        made: list[Any] = []

        def kernel(*given: Any) -> Any:
            if not made:
                with without_vectors(), torch._inductor.config.patch(_PLAIN):
                    future = compile_now(self, *args)
                    made.append(future.result() if hasattr(future, "result") else future)
            return made[0](*given)

        return kernel

    def without_vectors() -> Any:
        return patch.object(vectors, "valid_vec_isa_list", list)  # finding out what a CPU has compiles programs

    with patch.object(AsyncCompile, "cpp_pybinding", later), without_vectors():
        yield


@contextmanager
def _wrapper_goes_to(device: str, receive: Callable[[GraphModule], Callable[..., Any]]) -> Iterator[None]:
    """A backend that takes the wrapper as an FX graph is registered for the device, as an out-of-tree one would be."""
    from torch._inductor.codegen import common
    from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen

    class Received(WrapperFxCodegen):
        def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
            return receive(gm)

    common.init_backend_registration()
    known = common.device_codegens[device]
    tables = (common.device_codegens, common.custom_backend_passes, common.custom_backend_codegen_configs)
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(patch.dict(table))
        common.register_backend_for_device(device, known.scheduling, known.wrapper_codegen, None, Received)
        yield


def lower(
    graph: GraphModule,
    example_inputs: list[Any],
    config: dict[str, Any],
    receive: Callable[[GraphModule], Callable[..., Any]] | None = None,
) -> tuple[Any, Lowered]:
    """Lower one forward graph for inference: what Inductor returns, boxed, and what it did. C++ is compiled when run.

    receive: gets the wrapper as an FX graph, and returns what is called in its place.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    output = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = visible_outputs(graph, len(output.args[0]))  # type: ignore[arg-type]
    keywords: dict[str, Any] = {"is_inference": True, "static_input_idxs": []}
    with ExitStack() as stack:
        if receive is not None:
            devices = {v.device.type for v in example_inputs if isinstance(v, torch.Tensor)}
            stack.enter_context(_wrapper_goes_to(devices.pop(), receive))
            # in one process: of a Triton kernel that a worker compiled, the wrapper gets no source
            config = {**config, "fx_wrapper": True, "compile_threads": 1}
            keywords["fx_wrapper"] = True
        stack.enter_context(torch._inductor.config.patch(config))
        found = stack.enter_context(watched())
        stack.enter_context(_compiled_when_called())
        stack.enter_context(kernels.watched())
        compiled = compile_fx_inner(graph, example_inputs, **keywords)
    return compiled, found[-1]


def name_inputs(graph: GraphModule) -> dict[str, str]:
    """Name the inputs `arg0_1`, `arg1_1`, ... as AOTAutograd does for inference: each new name, with the one before.

    Inductor goes by names: it takes any other input for memory that it may free (`is_nonfreeable_buffers`).
    """
    named = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        named[f"arg{i}_1"] = node.name
        node.name = node.target = f"arg{i}_1"  # as torch.export does: torch.fx would find the name used before
    graph.recompile()
    return named


def mark_fallback(node: torch.fx.Node) -> None:
    """Inductor hands this node to the eager operator, and fuses it with nothing."""
    node.meta["should_fallback"] = True
