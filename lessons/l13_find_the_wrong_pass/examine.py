"""Runs a pipeline of "Find the wrong pass" on a fake rank, and says what its passes did. It spoils the first case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from workbench.authoring.author import author
from workbench.checks.record import PassRecord
from workbench.graph.capture import capture
from workbench.graph.partition import ForwardBackward, partition
from workbench.graph.patterns import find_nodes
from workbench.graph.read.nodes import provenance
from workbench.notebook.draw.picture import Table
from workbench.pipeline.run_passes import run_joint, run_partitioned
from workbench.world.fake import fake_world
from workbench_lessons.l13_find_the_wrong_pass.suspects import pipeline

Case = tuple[list[PassRecord], ForwardBackward]


def run_pipeline(
    name: str, dim: int, rank: int = 0, without: str = "", edit: Callable[[GraphModule], object] | None = None
) -> Case:
    """A record for each pass, and the forward and backward that the last one left, as one of two fake ranks.

    without: a pass to leave out. edit: a change of the joint graph by hand, after its passes.
    """
    recipe = pipeline(name, dim, without)
    with fake_world(2, rank) as world:
        joint = capture(author(recipe, world))
        records = list(run_joint(joint, recipe.joint_passes))
        if edit:
            edit(joint.graph)
        pair = partition(joint, by="default")
        return records + list(run_partitioned(pair, recipe.passes)[0]), pair


def gathers(graph: GraphModule) -> list[Node]:
    """The all-gathers of a graph, in order."""
    return find_nodes(graph, op="all_gather_into_tensor*")


def said(records: Sequence[PassRecord]) -> Table:
    """Each pass: joint or split, its options, the all-gathers before and after it, and its effect."""
    rows = []
    for record in records:
        counts = f"{len(gathers(record.before[0]))} to {len(gathers(record.after[0]))}"
        effect = str(record.verdict("effect")).removeprefix("effect: ")
        stage = "joint" if len(record.before) == 1 else "split"
        rows.append((record.name, stage, record.options, counts, effect))
    return Table("what each pass did and said", ("pass", "stage", "options", "gathers", "effect"), tuple(rows))


def blame(trees: Sequence[PassRecord]) -> tuple[str, ...]:
    """The wrong pass of `trees`, read from its graphs, and why it is wrong."""
    wrong = next(record for record in trees if not all(provenance(n).module for n in gathers(record.after[0])))
    (had, _), (lost, many) = _without_line(wrong.before[0]), _without_line(wrong.after[0])
    return (wrong.name,
            f"{wrong.name} copies only shape and dtype of each collective: new.meta['val'] = old.meta['val']",
            f"operators without a source line: {had} before, {lost} of {many} after it ({lost / many:.0%})")


def _without_line(graph: GraphModule) -> tuple[int, int]:
    """How many operators have no source line, and how many there are."""
    operators = [n for n in graph.graph.nodes if n.op == "call_function"]
    return sum(not n.meta.get("stack_trace") for n in operators), len(operators)
