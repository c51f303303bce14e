"""Run what Inductor made of a step once, on zeros and in one process: that builds and tunes its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.partition import saved_order


def run_once(graphs: Sequence[GraphModule], bodies: Sequence[Callable[[list[Any]], Any]]) -> None:
    """Call the forward's body and then the backward's with what it saved, or that of the whole step.

    The collectives of a fake world give memory as they find it: only the kernels and their configurations are kept.
    """
    with torch.no_grad():
        made = list(bodies[0](_zeros(_inputs(graphs[0]))))
        if len(graphs) > 1:
            results = facts_of(graphs[0]).step.results
            saved = [made[results + place] for place in saved_order(*graphs)]
            del made
            bodies[1]([*saved, *_zeros(_inputs(graphs[1])[len(saved):])])
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _inputs(graph: GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]


def _zeros(values: Sequence[Any]) -> list[Any]:
    """A tensor of zeros for each tensor, in its memory layout; a mesh or None stays."""
    return [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
            if isinstance(value, torch.Tensor) else value for value in values]
