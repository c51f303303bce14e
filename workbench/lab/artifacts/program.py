"""One rank's step: written by the process that compiled it, and loaded by the rank.

`python -m workbench.lab.artifacts.program FOLDER` loads each as a rank does, which builds the kernels that it takes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from workbench.authoring.authored import Authored
from workbench.checks.record import PassRecord, step_verdicts
from workbench.checks.verdicts import Verdict
from workbench.graph.capture import title
from workbench.graph.facts import GraphFacts, Part, StepFacts, facts_of, set_facts
from workbench.graph.lower import Step, bind
from workbench.graph.pair_function import PairFunction
from workbench.graph.partition import ForwardBackward, Split, saved_order
from workbench.pipeline.machine import gpus
from workbench.pipeline.report import PassRow
from workbench.pipeline.run_passes import run_partitioned, saved_bytes
from workbench.pipeline.stages import passes_before, step_kind
from workbench.pipeline.train import recipe_of
from workbench.recipe.contracts import Stage
from workbench.torch_api import aot, partitioning
from workbench.torch_api.distributed.named_groups import alias_groups, rename_groups
from workbench.torch_api.inductor.bucketing import twin_group
from workbench.torch_api.inductor.written_code import Boxed, Compiled, WrittenGraph
from workbench.torch_api.restoring import shard_of


@dataclass(frozen=True)
class Program:
    """A step on one rank. groups: the names of its process groups, in order. pair: arguments of ForwardBackward.
    numbers: what the recipe's kind of step needs beside. rows, pipeline: verdicts on its passes, as in a report.
    """

    graphs: dict[Part, WrittenGraph]
    groups: list[str]
    flop: int
    facts: StepFacts
    pair: dict[str, Any]
    numbers: dict[str, Any]
    gradients: list[str | None]
    saved_bytes: int
    rows: list[PassRow]
    pipeline: list[Verdict]


def written(split: Split) -> dict[Part, WrittenGraph]:
    """The graphs, by part. WorkbenchError for what no file can hold."""
    parts = zip(split.parts, split.graphs, strict=True)
    return {part: WrittenGraph.of(graph, f"the {part} graph") for part, graph in parts}


def digests(split: Split) -> list[str]:
    """Of each graph, what is the same in every process that captures the same."""
    return [graph.digest for graph in written(split).values()]


def lower(split: Split, groups: list[str], flop: int) -> Program:
    """Run the lowering passes, and write what a rank loads. The replay passes are left to it: a recording cannot be
    written. On a GPU the step runs once, which builds and tunes its kernels.
    """
    graphs, pair = written(split), split.pair
    recipe = recipe_of(pair.authored)
    specs = passes_before(recipe.passes, (Stage.REPLAY,))
    early = passes_before(specs, (Stage.LOWERING,))
    _, bodies = run_partitioned(split, specs[len(early):])
    for part, body in zip(graphs, bodies or (), strict=False):
        graphs[part] = replace(graphs[part], compiled=Compiled.of(body, f"the {part} graph"))
    by_inductor = any(graph.compiled or graph.regions for graph in graphs.values())
    if by_inductor and pair.authored.world.device.type == "cuda":
        run_once(split.graphs, bodies or tuple(map(aot.boxed, split.graphs)))
    descs = [graph.graph.output_node().meta["desc"] for graph in pair.graphs]
    arguments = {"parameters": pair.parameters, "buffers": pair.buffers, "inputs": pair.inputs,
                 "writes": tuple(partitioning.written_names(pair.forward))}
    facts = StepFacts(split.facts.results, tuple(saved_order(*pair.graphs)))
    rows = [PassRow.of(record) for record in split.known.records]
    return Program(graphs, groups, flop, facts, arguments, step_kind(recipe).numbers(split),
                   list(map(aot.gradient_of, descs[1])), saved_bytes(pair), rows,
                   step_verdicts(split.known))


def run_once(graphs: Sequence[GraphModule], bodies: Sequence[Boxed]) -> None:
    """Run the forward's body and the backward's with what it saved, or that of the whole step, on zeros.

    The collectives of a fake world give memory as they find it.
    """
    with torch.no_grad():
        outputs = list(bodies[0](_zeros(graphs[0])))
        if len(graphs) > 1:
            results = facts_of(graphs[0]).step.results
            saved = [outputs[results + place] for place in saved_order(*graphs)]
            del outputs
            tangents = _zeros(graphs[1])[len(saved):]
            bodies[1]([*saved, *tangents])
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _zeros(graph: GraphModule) -> list[Any]:
    """For each input a tensor of zeros in its memory layout; a mesh or None stays."""
    inputs = []
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype,
                                        device=value.device).zero_()
        inputs.append(value)
    return inputs


def read_program(file: Path, gpu: int | None) -> Program:
    """The program in `file`, with its constants on this process's GPU, where it has one."""
    devices = None if gpu is None else {"cuda:0": f"cuda:{gpu}"}
    program: Program = torch.load(file, map_location=devices, weights_only=False)
    return program


def load_step(authored: Authored, program: Program) -> tuple[Step, list[PassRecord]]:
    """The step of this rank, and the records of its replay passes, which record here. Every rank calls it.

    Runs the program's code as Python: only load what you would run.
    """
    find_groups(program.groups, authored)
    slots: list[Any] = []
    for part, file in program.graphs.items():
        graph, body = file.load(authored.world.device.index)
        set_facts(graph, GraphFacts(part, step=program.facts))
        layouts = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        slots.append(SimpleNamespace(graph=graph, body=body, example_inputs=layouts,
                                     context=contextlib.nullcontext))
    names = [*program.pair["parameters"], *program.pair["buffers"]]
    function = PairFunction(title(authored), (), names, program.pair["writes"],
                            program.facts.saved_order or (), program.gradients,
                            _inputs_by_name(slots[0].graph, names))
    pair = ForwardBackward((slots[0], slots[-1]), authored, function=function, **program.pair)
    pair.facts = program.facts
    kind = step_kind(recipe_of(authored))
    split = kind.restored(pair, program.numbers)
    split.known.bodies = loaded = tuple(slot.body for slot in slots)
    passes = recipe_of(authored).passes
    replays = passes[len(passes_before(passes, (Stage.REPLAY,))):]
    records, bodies = run_partitioned(split, replays)
    bind(split, bodies or loaded)
    function.bodies = bodies or loaded
    return kind.step(split), records


def name_groups(split: Split) -> list[str]:
    """Write each collective's process group as its name on every rank: a mesh axis, its twin, or "world". Returns the
    names, which this process has too.

    torch numbers groups in the order in which a process makes them: no two worlds agree on the numbers.
    """
    groups = _groups(split.pair.authored)
    for graph in split.graphs:
        facts = facts_of(graph)
        groups |= facts.groups
        alias_groups(groups)
        names = {group: name for name, group in groups.items()}
        rename_groups(graph, names)
        facts.groups = {axis: names[group] for axis, group in facts.groups.items()}
        facts.group_sizes = {names.get(group, group): size
                             for group, size in facts.group_sizes.items()}
    return list(groups)


def find_groups(names: Sequence[str], authored: Authored) -> None:
    """Give this rank's process groups those names. Every rank calls it, in one order: twins are made here."""
    groups = _groups(authored)
    for name in names:
        axis = name.removesuffix(".gather")
        if axis != name:
            groups[name] = twin_group(groups[axis])
    alias_groups(groups)


def _groups(authored: Authored) -> dict[str, str]:
    everyone = dist.group.WORLD
    world = {} if everyone is None else {"world": str(everyone.group_name)}
    return world | authored.groups


def _inputs_by_name(
    forward: GraphModule, names: Sequence[str]
) -> Callable[[Sequence[Any]], list[Any]]:
    """What the forward takes of tensors of these names and a batch: shards, their meshes, and the batch."""
    inputs = [
        (aot.parameter_of(n), n.meta["val"]) for n in forward.graph.find_nodes(op="placeholder")
    ]

    def take(values: Sequence[Any]) -> list[Any]:
        by_name, batch = dict(zip(names, values, strict=False)), iter(values[len(names):])
        taken: list[Any] = []
        for name, layout in inputs:
            if name is None:
                taken.append(next(batch))
            else:
                taken.append(
                    by_name[name].device_mesh if layout is None else shard_of(by_name[name])
                )
        return taken

    return take


if __name__ == "__main__":
    number = 0 if gpus() else None
    for path in sorted(Path(sys.argv[1]).glob("program_*.pt")):
        for file in read_program(path, number).graphs.values():
            file.load(number)
