"""A context in which Inductor's overlap schedulers take the times that they are given.

Source: torch/_inductor/fx_passes/overlap_scheduling.py. They have a hook, `custom_runtime_estimation`, and still look
for the machine's own GPU: torch 2.13 for estimates that the hook's replace, 2.11 to measure each matmul, whose times
the ranks then exchange. Works without a GPU and without triton on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch.fx import Node

Milliseconds = Callable[[Node, int | None], float]
"""Of a node, or of a collective of so many bytes in place of its own; equal on every rank."""


@contextmanager
def scheduler_times(ms: Milliseconds) -> Iterator[Milliseconds]:
    """Inside, torch estimates and measures nothing itself. Give `ms` as `custom_runtime_estimation`, too."""
    # on first use: these imports take a second
    overlap: Any = import_module("torch._inductor.fx_passes.overlap_scheduling")
    runtimes: Any = import_module("torch._inductor.fx_passes.node_runtime_estimation")

    def of_node(node: Node, *_: Any) -> float:
        return ms(node, None)

    replaced = (
        (overlap, "estimate_roofline_runtime_ms", of_node),
        (overlap, "estimate_runtime_analytical", of_node),
        (overlap, "benchmark_node_with_cache_key", lambda node, *_: (of_node(node), None)),
        (overlap.OverlapScheduler,
         "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks", lambda _: None),
        # a table for TORCH_TRACE; torch 2.12 fails to count the FLOP of sizes that a step decides
        (runtimes, "_log_compute_estimations", lambda *_: None),
    )
    with ExitStack() as stack:
        for place, name, function in replaced:
            if hasattr(place, name):
                stack.enter_context(patch.object(place, name, function))
        yield ms
