"""Inductor's decomposition table, options and compiler entry point."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import _guards
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.torch_api.inductor import kernels
from workbench.torch_api.inductor.joined_buffers import joined_kept
from workbench.torch_api.inductor.saved_values import compute_once


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The operators that Inductor decomposes, with their decompositions; without those that draw random numbers."""
    from torch._inductor.decomposition import select_decomp_table

    with torch._inductor.config.patch(fallback_random=True):
        table = dict(select_decomp_table())
    table.pop(torch.ops.aten.bernoulli.default, None)  # by rand, which draws others
    return table


def configured(options: dict[str, Any]) -> AbstractContextManager[None]:
    """A context with these options of Inductor."""
    return torch._inductor.config.patch(options)


def detect_fake_mode(values: Any) -> Any:
    """The fake mode of these values, or None."""
    return _guards.detect_fake_mode(values)


@contextmanager
def _written_only() -> Iterator[None]:
    """Inside, Inductor writes its C++ kernels without calling g++, which takes nearly all of the time.

    Source: torch/_inductor/async_compile.py (`AsyncCompile.cpp_pybinding`, which the wrapper calls for each kernel).
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def not_built(*_: Any, **__: Any) -> Callable[..., Any]:
        def kernel(*_: Any) -> Any:
            raise WorkbenchError(
                "this kernel was written and not built, on a fake world: take real ranks"
            )

        return kernel

    # Inductor caches wrappers by their text: one from here must not serve a compilation whose kernels will run
    with (
        patch.object(AsyncCompile, "cpp_pybinding", not_built),
        patch.object(AsyncCompile, "cpp", not_built),
        patch.dict(PyCodeCache.modules_no_attr),
    ):
        yield


def visible_outputs(graph: GraphModule, count: int) -> list[int]:
    """The indices of the nodes among the first `count` outputs. On a GPU, Inductor fails on None, a mesh's gradient."""
    outputs = graph.graph.output_node().args[0]
    assert isinstance(outputs, list | tuple)
    return [i for i, output in enumerate(outputs[:count]) if isinstance(output, Node)]


def compile_inner(
    graph: GraphModule,
    example_inputs: list[Any],
    *,
    is_backward: bool,
    static: list[int],
    visible: int,
    config: dict[str, Any],
    once: Collection[str] = (),
    build: bool = True,
) -> tuple[Any, list[tuple[int, ...] | None]]:
    """Lower one graph with `compile_fx_inner`: the boxed callable, and the strides that Inductor chose per output.

    The first `visible` outputs keep their layout in the graph; Inductor chooses that of the others (saved tensors).
    The nodes named in `once` are computed once, and not again inside each kernel that reads them.
    Random operators draw what eager's do. `kernels.seen` reads the kernels of the callable. Without `build`, the C++
    kernels are written and not compiled, and the callable cannot be called.
    """
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.default):
        raise WorkbenchError(
            f"node {node.name!r} is torch.bernoulli of a tensor, for which Inductor draws other numbers than eager: "
            "write torch.rand_like(p) < p, or drop full_inductor_compilation"
        )
    compute_once(graph.graph, once)
    graph.graph.output_node().meta["user_visible_output_idxs"] = visible_outputs(graph, visible)
    record_original_output_strides(graph)
    with (
        torch._inductor.config.patch({"fallback_random": True, **config}),
        _guards.TracingContext.report_output_strides() as strides,
        kernels.watched(),
        joined_kept(),
        nullcontext() if build else _written_only(),
    ):
        compiled = compile_fx_inner(
            graph, example_inputs, is_backward=is_backward, static_input_idxs=static
        )
    return compiled, list(strides or [])
