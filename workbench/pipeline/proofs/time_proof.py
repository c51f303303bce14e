"""Time on real ranks: how long a step's graphs run before each pass and after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from workbench.graph.lower import Step
from workbench.pipeline.proofs.numerics_proof import (
    inputs_by_parts,
    of_record,
    run_graphs,
    written_inputs,
)
from workbench.pipeline.run_passes import PassRecord
from workbench.pipeline.train import Batches, recipe_of
from workbench.torch_api.determinism import deterministic
from workbench.world.mesh import World

REPEATS = 3


def time_graphs(records: Sequence[PassRecord], step: Step) -> None:
    """Time the graph that each record received and the one it made, on all ranks: its `ran_for`.

    Every rank calls it, on a world with values. Joint graphs and partitioned pairs run node by node, compiled ones as
    they are. The least of three runs counts, on the slowest rank.
    """
    authored = step.pair.authored
    recipe = recipe_of(authored)
    known: dict[tuple[int, ...], float] = {}
    with deterministic(recipe.training.deterministic), torch.no_grad():
        given = inputs_by_parts(step, Batches(authored).first())
        for record in records:
            took = []
            primals, tangents = of_record(given, record)
            written = written_inputs(record, primals, tangents)
            for graphs in (record.before, record.after):
                key = tuple(map(id, graphs))
                if key not in known:
                    run = partial(run_graphs, record, graphs, primals, tangents, written)
                    known[key] = _least(run, authored.world)
                took.append(known[key])
            record.ran_for = took[0], took[1]


def _least(function: Callable[[], Any], world: World) -> float:
    """Seconds of the fastest of a few runs, on the slowest rank."""
    function()  # writes the graph's code, and warms what the device warms
    best = float("inf")
    for _ in range(REPEATS):
        if world.size > 1:
            dist.barrier()
        world.synchronise()
        started = time.perf_counter()
        function()
        world.synchronise()
        best = min(best, time.perf_counter() - started)
    worst = torch.tensor(best, dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
