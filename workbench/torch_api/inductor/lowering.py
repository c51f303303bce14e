"""Inductor's decomposition table, compiler entry point and bucketing schedulers, with per-version differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.torch_api.inductor import kernels


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The operators that Inductor replaces, as `select_decomp_table` gives them."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def configured(options: dict[str, Any]) -> AbstractContextManager[None]:
    """A context in which Inductor has these options."""
    return torch._inductor.config.patch(options)


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that this torch's `function` knows; schedulers gain some with every release."""
    known = inspect.signature(function).parameters
    return {k: v for k, v in keywords.items() if k in known}


def detect_fake_mode(values: Any) -> Any:
    from torch._guards import detect_fake_mode as detect

    return detect(values)


@contextmanager
def _written_only() -> Iterator[None]:
    """Inside, Inductor writes its C++ kernels and g++ is not called for them, which is nearly all the time it takes.

    Source: torch/_inductor/async_compile.py (`AsyncCompile.cpp_pybinding`, which the written wrapper calls for each).
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def not_built(*_: Any, **__: Any) -> Callable[..., Any]:
        def kernel(*_: Any) -> Any:
            raise WorkbenchError("this kernel was written and not built, on a fake world: take real ranks")

        return kernel

    # wrappers are kept by their text: one that is loaded here must not serve a compilation whose kernels will run
    with (patch.object(AsyncCompile, "cpp_pybinding", not_built), patch.object(AsyncCompile, "cpp", not_built),
          patch.dict(PyCodeCache.modules_no_attr)):
        yield


def visible_outputs(graph: GraphModule, count: int) -> list[int]:
    """Those of the first `count` outputs that are nodes: on a GPU, Inductor stumbles over None, a mesh's gradient."""
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
    build: bool = True,
) -> tuple[Any, list[tuple[int, ...] | None]]:
    """Lower one graph with `compile_fx_inner`: the boxed callable, and the strides it chose for each output.

    The first `visible` outputs keep the layout that the graph gives them; the others (saved tensors) are free.
    `inductor_kernels.seen` says of the callable which kernels it runs. Without `build` the C++ kernels are written and
    not compiled, and the callable cannot be called.
    """
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    graph.graph.output_node().meta["user_visible_output_idxs"] = visible_outputs(graph, visible)
    record_original_output_strides(graph)
    with (torch._inductor.config.patch(config), TracingContext.report_output_strides() as strides,
          kernels.watched(), nullcontext() if build else _written_only()):
        compiled = compile_fx_inner(graph, example_inputs, is_backward=is_backward, static_input_idxs=static)
    return compiled, list(strides or [])
