"""Inductor's decomposition table, compiler entry point and bucketing schedulers, with per-version differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch.fx import GraphModule


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """The operators that Inductor replaces, as `select_decomp_table` gives them."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that this torch's `function` knows; schedulers gain some with every release."""
    known = inspect.signature(function).parameters
    return {k: v for k, v in keywords.items() if k in known}


def detect_fake_mode(values: Any) -> Any:
    from torch._guards import detect_fake_mode as detect

    return detect(values)


def compile_inner(
    graph: GraphModule, example_inputs: list[Any], *, is_backward: bool, static: list[int], config: dict[str, Any]
) -> Any:
    """Lower one graph with `compile_fx_inner`; the result is boxed.

    The forward's layout of outputs that the user sees is pinned before, as `compile_fx` does.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import record_original_output_strides

    output = graph.graph.output_node()
    output.meta.setdefault("user_visible_output_idxs", [] if is_backward else list(range(len(output.args[0]))))
    record_original_output_strides(graph)
    keywords = {"is_backward": is_backward, "static_input_idxs": static}
    with torch._inductor.config.patch(config):
        return compile_fx_inner(graph, example_inputs, **accepted(compile_fx_inner, keywords))


def is_random(target: Any) -> bool:
    """True for operators whose result depends on the generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
