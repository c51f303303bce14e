"""Inductor's decomposition table, compiler entry point and bucketing schedulers, with per-version differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._inductor.config
from torch.fx import GraphModule, Node

from workbench.torch_api import inductor_kernels


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
) -> tuple[Any, list[tuple[int, ...] | None]]:
    """Lower one graph with `compile_fx_inner`: the boxed callable, and the strides it chose for each output.

    The first `visible` outputs keep the layout that the graph gives them; the others (saved tensors) are free.
    `inductor_kernels.seen` says of the callable which kernels it runs.
    """
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    graph.graph.output_node().meta["user_visible_output_idxs"] = visible_outputs(graph, visible)
    record_original_output_strides(graph)
    with (torch._inductor.config.patch(config), TracingContext.report_output_strides() as strides,
          inductor_kernels.watched()):
        compiled = compile_fx_inner(graph, example_inputs, is_backward=is_backward, static_input_idxs=static)
    return compiled, list(strides or [])
