"""Numerics on real ranks: each pass against the graph it received, and the whole list against eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.analysis.memory import writes_inputs
from workbench.compiled_step import CompiledStep
from workbench.contracts import CONTRACTS, Numerics, PassContract, Stage
from workbench.forward_backward import saved_order
from workbench.passes.body import Body
from workbench.pipeline import PassRecord
from workbench.torch_api import aot
from workbench.torch_api import tree as pytree
from workbench.torch_api.determinism import seeded
from workbench.training import Batches, deterministic, gradients
from workbench.verify import numerics
from workbench.verify.values import copies
from workbench.verify.verdicts import Outcome, Verdict

_ORDER = (Numerics.EXACT, Numerics.REDUCTION_ORDER, Numerics.LOSSY)


def loosest(records: Sequence[PassRecord]) -> PassContract:
    """The contract under which the whole list is compared with eager; EXACT for an empty list."""
    contracts = [CONTRACTS[r.name] for r in records]
    exact = PassContract("no pass", Stage.JOINT, Numerics.EXACT, "nothing")
    return max([exact, *contracts], key=lambda c: (_ORDER.index(c.numerics), c.tolerance or 0.0))


def _run(step: CompiledStep, function: Any, batch: tuple[Any, ...]) -> list[torch.Tensor]:
    """The loss and every gradient, by sorted name, of one step on this rank; the module keeps its own gradients."""
    parameters = list(step.module.parameters())
    kept = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with seeded(0):
            loss = function(*batch)
            loss.backward()
        found = gradients(step.pair.authored)
        return [loss.detach().clone(), *(found[name].detach().clone() for name in sorted(found))]
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


def _noted(seen: dict[str, list[Any]], name: str, runner: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    seen[name] = list(args)
    return runner(args)


def real_inputs(step: CompiledStep, batch: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The flat primals and tangents of one real step, as the graphs receive them: local tensors, sizes and meshes."""
    seen: dict[str, list[Any]] = {}
    bodies = [slot.body for slot in step.pair.slots]
    try:
        for name, slot, graph in zip(("forward", "backward"), step.pair.slots, step.pair.graphs, strict=True):
            runner = aot.boxed(graph)

            slot.body = partial(_noted, seen, name, runner)
        _run(step, step, batch)
    finally:
        for slot, body in zip(step.pair.slots, bodies, strict=True):
            slot.body = body
    tangents = sum(aot.is_tangent(n) for n in step.pair.backward.graph.find_nodes(op="placeholder"))
    return seen["forward"], seen["backward"][len(seen["backward"]) - tangents :]


def _joint(graph: Any, primals: list[Any], tangents: list[Any]) -> list[Any]:
    return pytree.tree_leaves(graph(list(primals), list(tangents)))


def _call(function: Any, args: list[Any]) -> list[Any]:
    return list(function(list(args)) if getattr(function, "_boxed_call", False) else function(*args))


def _pair(record: PassRecord, which: tuple[Any, ...], primals: list[Any], tangents: list[Any]) -> list[Any]:
    """Outputs and gradients of a forward and backward; saved tensors may differ between graphs and are left out."""
    forward, backward = which
    order = saved_order(*(b.graph if isinstance(b, Body) else b for b in record.before))
    outputs = _call(forward, primals)
    results = len(outputs) - len(order)
    kept = [outputs[results + i] for i in order]
    return outputs[:results] + _call(backward, kept + tangents)


def run_graphs(record: PassRecord, graphs: tuple[Any, ...], primals: list[Any], tangents: list[Any]) -> list[Any]:
    """The outputs and gradients of a record's graphs, those it received or those it made, on one step's inputs."""
    with seeded(0):
        if record.stage is Stage.JOINT:
            return _joint(graphs[0], primals, tangents)
        if record.stage is Stage.REPLAY and graphs is record.after:
            while not graphs[1].replays:  # the first calls are not replays yet
                _pair(record, graphs, primals, tangents)
        return _pair(record, graphs, primals, tangents)


def _compared(record: PassRecord, primals: list[Any], tangents: list[Any], size: int) -> Verdict:
    # in a function of its own: a replay must not find the results of the last one still held
    given = [(primals, tangents)] * 2
    if any(isinstance(graph, GraphModule) and writes_inputs(graph) for graph in (*record.before, *record.after)):
        given = [(copies(primals), copies(tangents)) for _ in range(2)]
    before, after = (run_graphs(record, g, *own) for g, own in zip((record.before, record.after), given, strict=True))
    return numerics.compare(before, after, CONTRACTS[record.name], group_size=size)


def prove_numerics(
    records: Sequence[PassRecord], step: CompiledStep, batch: tuple[Any, ...] | None = None
) -> list[Verdict]:
    """Add a numerics verdict to each record; returns the verdict of the whole list against eager.

    `batch`: one step's inputs; by default the recipe's first, or the example batch of a module without a recipe.
    Every rank calls it, and each gets the same verdicts. On a fake world all of them are UNKNOWN.
    """
    authored = step.pair.authored
    if authored.world.kind not in ("gloo", "nccl"):
        why = f"a {authored.world.kind} world has no values of its own: run on real ranks"
        unknown = Verdict("numerics", Outcome.UNKNOWN, why)
        for record in records:
            record.verdicts.append(unknown)
        return [unknown]
    recipe = authored.recipe
    if batch is None:
        batch = Batches(authored).at(0) if recipe is not None else authored.example_batch()
    size = max([1, *(authored.mesh.shape if authored.mesh is not None else ())])
    with deterministic(recipe.training.deterministic if recipe is not None else True), torch.no_grad():
        with torch.enable_grad():
            primals, tangents = real_inputs(step, batch)
        for record in records:
            if getattr(record.options, "at", None) == "capture":
                why = "done while tracing, so this pass received no other graph: see the whole list against eager"
                record.verdicts.append(Verdict("numerics", Outcome.UNKNOWN, why))
                continue
            record.verdicts.append(_compared(record, primals, tangents, size))
        with torch.enable_grad():
            eager, compiled = _run(step, step.module, batch), _run(step, step, batch)
    return [numerics.compare(eager, compiled, loosest(records), group_size=size)]
