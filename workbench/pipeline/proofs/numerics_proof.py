"""Numerics on real ranks: each pass against the graph it received, and the whole list against eager."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.authoring.authored import Authored
from workbench.checks import numerics
from workbench.checks.agreement import require_same_launches
from workbench.checks.numerics import Comparison, copies
from workbench.checks.record import check_eager
from workbench.checks.verdicts import Verdict
from workbench.graph.callables import graph_of
from workbench.graph.lower import CompiledStep, Step
from workbench.graph.partition import PARTS, saved_order
from workbench.graph.read.memory import inputs_written
from workbench.graph.read.nodes import output_values
from workbench.pipeline.proofs.authoring_proof import prove_authoring
from workbench.pipeline.proofs.two_steps import (
    one_step,
    optimizer_steps,
    two_steps,
    written_in_place,
)
from workbench.pipeline.run_passes import PassRecord
from workbench.pipeline.train import Batches
from workbench.recipe.contracts import Numerics, PassContract, Stage
from workbench.torch_api import aot
from workbench.torch_api import tree as pytree
from workbench.torch_api.determinism import deterministic, seeded
from workbench.torch_api.restoring import restoring, restoring_module
from workbench.world.mesh import all_gather_object

_ORDER = (Numerics.EXACT, Numerics.REDUCTION_ORDER, Numerics.LOSSY)
_CAPTURE = PassContract(
    "capture", Stage.JOINT, Numerics.REDUCTION_ORDER, "eager is another program than the graph"
)
"""On some CPUs a product rounds by the layout of its operands, in which the two may differ."""


def loosest(records: Sequence[PassRecord]) -> PassContract:
    """The contract under which the whole list is compared with eager: REDUCTION_ORDER, or that of a LOSSY pass."""
    contracts = [record.item.contract for record in records]
    return max([_CAPTURE, *contracts], key=lambda c: (_ORDER.index(c.numerics), c.tolerance or 0.0))


def _against_eager(
    eager: Mapping[str, Any], compiled: Mapping[str, Any], records: Sequence[PassRecord], size: int,
    moved: Mapping[str, Any],
) -> Comparison:
    """Equal bits, or else within the loosest contract, or what `moved` allows."""
    names = list(dict.fromkeys((*eager, *compiled)))
    values = [eager.get(name) for name in names], [compiled.get(name) for name in names]
    bits = numerics.compare(*values, replace(_CAPTURE, numerics=Numerics.EXACT), names=names)
    if not bits.problems:
        return bits
    far = [moved.get(name) for name in names]
    return numerics.compare(*values, loosest(records), group_size=size, names=names, moved=far)


def compare_steps(
    step: Step, batches: Sequence[tuple[Any, ...]], records: Sequence[PassRecord], size: int
) -> list[Comparison]:
    """What each rank finds in a step for each batch, compiled against eager; every rank must call it.

    Where a result exceeds its bound, eager runs twice more, from its own state and from one that moved by one eps. What
    is not the same in eager's two runs, as where the forward reads what it counts in Python, is allowed nothing more.
    """
    run = two_steps if step.optimizer is None else optimizer_steps
    eager, compiled = run(step, batches)
    comparisons = all_gather_object(_against_eager(eager, compiled, records, size, {}))
    if any(comparison.problems for comparison in comparisons):
        again, moved = run(step, batches, eps=numerics.eps_of(step.pair.graphs))
        for name, value in eager.items():
            if numerics.compare_one(value, again.get(name), None)[0]:
                moved.pop(name, None)
        comparisons = all_gather_object(_against_eager(eager, compiled, records, size, moved))
    return comparisons


def real_inputs(step: CompiledStep, batch: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The flat primals and tangents of one real step, as the graphs receive them: local tensors, sizes and meshes."""
    inputs: list[list[Any]] = []

    def noting(graph: GraphModule) -> Callable[[list[Any]], Any]:
        runner = aot.boxed(graph)

        def run(args: list[Any]) -> Any:
            inputs.append(list(args))
            return runner(args)

        return run

    bodies = [slot.body for slot in step.pair.slots]
    try:
        for slot in step.pair.slots:
            slot.body = noting(slot.graph)
        written = written_in_place(step)
        with restoring_module(step.module, written):
            one_step(step.module, step, batch, 0, written)
    finally:
        for slot, body in zip(step.pair.slots, bodies, strict=True):
            slot.body = body
    tangents = sum(aot.is_tangent(n) for n in step.pair.backward.graph.find_nodes(op="placeholder"))
    forward, backward = inputs
    return forward, backward[len(backward) - tangents :]


@contextmanager
def revealing(primals: Sequence[Any], tangents: Sequence[Any]) -> Iterator[list[Any]]:
    """Inside, inputs of one repeated value hold others; gives the tangents to run with. Afterwards all is as before.

    At a step's start a norm's weights are 1, biases are 0, and the gradient of the loss is 1. A pass that drops a
    product with a 1, or a sum with a 0, would change no result. Parameters change in place, since a replay reads their
    addresses. The new values are the same on every rank, as replicated parameters must be.
    """
    flat = {place: value for place, value in enumerate(primals) if _repeats(value)}
    with restoring(flat.values()):
        with torch.no_grad():  # a parameter on one rank is a leaf
            for place, value in flat.items():
                value.copy_(_varied(value, place))
        yield [
            _varied(value, place) if _repeats(value) else value
            for place, value in enumerate(tangents)
        ]


def _repeats(value: Any) -> bool:
    """Whether a tensor is floating-point and holds one finite value, in memory that it does not overlap itself."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    overlaps = any(
        stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True)
    )
    low, high = value.float().aminmax()
    return not overlaps and bool(low == high) and bool(low.isfinite())


def _varied(value: torch.Tensor, seed: int) -> torch.Tensor:
    """Larger values by a twentieth to a seventh of 1, or of the value; never smaller, as a variance must stay."""
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)).to(value.device)
    start = value.detach().float()
    return (start + start.abs().clamp_min(1.0) * (0.05 + 0.1 * noise)).to(value.dtype)


def _call(function: Any, args: list[Any]) -> list[Any]:
    return list(
        function(list(args)) if getattr(function, "_boxed_call", False) else function(*args)
    )


def _results(
    record: PassRecord, graphs: tuple[Any, ...], primals: list[Any], tangents: list[Any]
) -> list[Any]:
    """Outputs and gradients, without the saved tensors, which may differ between graphs."""
    if record.stage is Stage.JOINT:
        return pytree.tree_leaves(graphs[0](list(primals), list(tangents)))
    outputs = _call(graphs[0], primals)
    if len(graphs) == 1:
        return outputs
    order = saved_order(*map(graph_of, record.before))
    results = len(outputs) - len(order)
    saved = [outputs[results + place] for place in order]
    return outputs[:results] + _call(graphs[1], saved + tangents)


def run_graphs(
    record: PassRecord, graphs: tuple[Any, ...], primals: list[Any], tangents: list[Any],
    written: Mapping[str, torch.Tensor],
) -> list[Any]:
    """The outputs and gradients of `graphs`, which are `record.before` or `record.after`, on one step's inputs.

    written: as `written_inputs` returns them. Their new values are results too. Afterwards they have their old values
    again, at the same addresses, where a replay reads them.
    """

    def once() -> list[Any]:
        with restoring(written.values()):
            return _results(record, graphs, primals, tangents) + copies(list(written.values()))

    with seeded(0):
        if record.stage is Stage.REPLAY and graphs is record.after:
            while not graphs[-1].replays:  # the first calls are not replays yet
                once()
        return once()


def written_inputs(
    record: PassRecord, primals: list[Any], tangents: list[Any]
) -> dict[str, torch.Tensor]:
    """All input tensors by name, if a graph of the record writes into an input in place; otherwise none.

    Usually new buffers are outputs, which torch writes back; then there is nothing to copy.
    """
    graphs = list(map(graph_of, record.before))
    outputs = [graph for graph in record.after if isinstance(graph, GraphModule)]
    if not any(map(inputs_written, [*graphs, *outputs])):
        return {}
    nodes = graphs[0].graph.find_nodes(op="placeholder")
    for graph in graphs[1:]:
        nodes += filter(aot.is_tangent, graph.graph.find_nodes(op="placeholder"))
    inputs = zip(nodes, [*primals, *tangents], strict=True)
    return {
        aot.parameter_of(node) or node.name: value
        for node, value in inputs
        if isinstance(value, torch.Tensor)
    }


def result_names(
    record: PassRecord, results: list[Any], written: Mapping[str, torch.Tensor]
) -> list[str]:
    """A name for each result of `run_graphs`: a gradient, a new value of an input, or else its place in the outputs."""
    outputs = len(results) - len(written)
    graphs = list(map(graph_of, record.before))
    descs = [list(graph.graph.output_node().meta.get("desc") or []) for graph in graphs]
    if len(graphs) == 2:
        descs[0] = descs[0][:outputs - len(output_values(graphs[1]))]
    names = [f"output {i}" for i in range(outputs)]
    for i, desc in enumerate(itertools.chain(*descs)):
        if i < outputs and (name := aot.gradient_of(desc)):
            names[i] = f"gradient of {name}"
        elif i < outputs and (name := aot.written_by(desc)):
            names[i] = f"new value of {name}"
    return names + [f"new value of {name}" for name in written]


def compare_graphs(
    record: PassRecord, primals: list[Any], tangents: list[Any], size: int, *, moved: bool = False
) -> Comparison:
    """What this rank finds in the results of a record's graphs on these inputs; every rank must call it.

    moved: run `record.before` once more, where `allowance` may widen a bound: on `moved_inputs`, or for an exact
    contract on the same inputs, where kernels that add by atomics give other bits. A function of its own, so that a
    replay does not meet results of the previous one that are still referenced.
    """
    written = written_inputs(record, primals, tangents)
    before, after = (run_graphs(record, graphs, primals, tangents, written)
                     for graphs in (record.before, record.after))
    names, far = result_names(record, before, written), None
    contract = record.item.contract
    if moved:
        inputs = primals, tangents
        if contract.numerics is not Numerics.EXACT:
            inputs = moved_inputs(record, primals, tangents)
        far = run_graphs(record, record.before, *inputs, written_inputs(record, *inputs))
    return numerics.compare(before, after, contract, group_size=size, names=names, moved=far)


def moved_inputs(
    record: PassRecord, primals: list[Any], tangents: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Primals and tangents moved by one eps of the lowest dtype that `record.before` computes in."""
    eps = numerics.eps_of([graph_of(graph) for graph in record.before])
    inputs = numerics.moved_by_eps([*primals, *tangents], eps)
    return inputs[: len(primals)], inputs[len(primals) :]


def compare_on_ranks(
    record: PassRecord, primals: list[Any], tangents: list[Any], size: int, mine: Comparison
) -> list[Comparison]:
    """Each rank's comparison; `mine` is this rank's, by `compare_graphs` without `moved`. Every rank must call it.

    Where a rank's result breaks the contract, all ranks compare once more with `moved`. A difference without end, as of
    a graph that raised, is final.
    """
    comparisons = all_gather_object(mine)
    finite = all(math.isfinite(comparison.worst) for comparison in comparisons)
    if finite and any(comparison.problems for comparison in comparisons):
        mine = compare_graphs(record, primals, tangents, size, moved=True)
        comparisons = all_gather_object(mine)
    return comparisons


def group_size(authored: Authored) -> int:
    """Ranks of the largest mesh axis: the most terms that a reduction between ranks has."""
    return max([1, *(authored.mesh.shape if authored.mesh is not None else ())])


def prove_numerics(
    records: Sequence[PassRecord], step: Step, batch: tuple[Any, ...] | None = None
) -> list[Verdict]:
    """Compare each record's graphs, and the whole list of passes with eager, over two steps; returns what is known of
    the whole list then. Each record has a verdict `numerics` afterwards.

    `batch`: one step's inputs; by default the example batch. That of a recipe has random tokens of the whole
    vocabulary: text of few letters leaves the part of some tensor-parallel ranks unread, and a fault there unseen. The
    second step takes the first batch of the run's own data, or a second example batch where there is no recipe.
    Every rank calls it, and each gets the same verdicts. On a fake world all of them are UNKNOWN.
    """
    authored = step.pair.authored
    known = step.split.known
    if authored.world.kind not in ("gloo", "nccl"):
        known.side_effects = step.pair.side_effects, "run on real ranks"
        for fork in (known, *(record.known for record in records)):
            fork.no_values = (
                f"a {authored.world.kind} world has no values of its own: run on real ranks"
            )
        return check_eager(known)
    if batch is None:
        batch = authored.microbatch()
    size = group_size(authored)
    with deterministic(authored.deterministic), torch.no_grad():
        with torch.enable_grad():
            primals, tangents = real_inputs(CompiledStep(step.pair), batch)
        whole = step.inputs(*batch) if step.split.parts != PARTS else []
        with revealing([*primals, *whole], tangents) as varied:
            pair = primals, varied
            inputs = {("joint",): pair, PARTS: pair, ("step",): (whole, [])}
            for record in records:
                if not record.at_capture:
                    if record.has_graphs:
                        require_same_launches(record)
                    pair = inputs[record.parts]
                    mine = compare_graphs(record, *pair, size)
                    record.compared = compare_on_ranks(record, *pair, size, mine)
            if step.optimizer is not None:
                known.compared = compare_steps(step, [batch], records, size)
        if step.optimizer is None:
            second = authored.example_batch() if authored.recipe is None else Batches(authored).first()
            with torch.enable_grad():
                known.compared = compare_steps(step, [batch, second], records, size)
    for record in records:  # which may be of another fork of the run
        record.known.compared = known.compared
    if authored.mesh is not None:
        known.authoring = prove_authoring(authored, batch, step.pair.graphs)
    code = type(authored.module).forward.__code__  # a wrapper's may name no argument but *args
    of_module = f"L['{code.co_varnames[0]}']" + "[0]" * (not code.co_argcount)
    outside = tuple(source for source in step.pair.side_effects if not source.startswith(of_module))
    known.side_effects = outside, "two steps agree, and later ones may not"
    return check_eager(known)
