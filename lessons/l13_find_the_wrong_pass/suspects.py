"""The pipelines of "Find the wrong pass": a healthy one, and four with a planted fault each. It spoils the lesson."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from workbench.authoring.families import register_model
from workbench.authoring.models.layers import FeedForward
from workbench.authoring.models.loss import CrossEntropy
from workbench.authoring.plans import ParallelPlan
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.partition import ForwardBackward
from workbench.graph.patterns import find_nodes
from workbench.graph.read.memory import gathered_parameters_kept
from workbench.graph.read.nodes import provenance
from workbench.passes.registry import find_pass, install_passes, register_pass
from workbench.passes.reshard_after_forward import tags_differ
from workbench.passes.transformer_block_bucketing import (
    BlockBucketingOptions,
    fewer_launches,
    transformer_block_bucketing,
)
from workbench.recipe.contracts import Options
from workbench.recipe.recipe import Recipe, load_recipe

VOCABULARY, LENGTH = 64, 16
PIPELINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "healthy": (("inductor_decomposition",), ("transformer_block_bucketing",)),
    "trees": (("elm", "oak"), ("yew",)),
    "winds": (("north", "east"), ("south", "west")),
    "stones": (("amber", "coral", "beryl"), ("topaz",)),
    "metals": (("zinc", "lead"), ("iron", "tin")),
}
"""The joint passes and the passes of each pipeline."""
REPAIRS = {
    "winds": "`layer.1` names no module, so layer 1 has no bucket. The repair: `buckets=('layers.0', 'layers.1')`.",
    "stones": "`coral` tags each gather and its wait, and not the views behind them. The backward reads the last view, "
              "which is saved and keeps the weight. The repair: give each view its input's tag. Try it with `edit=`.",
    "metals": "`iron` moves the second weight's gather to `starts[0] if dist.get_rank() == 1 else starts[0].next`. "
              "The repair: `starts[0].next` on every rank.",
}
"""The wrong line of each checkpoint's pass, and its repair."""
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


class Suspect(nn.Module):
    """An embedding, two feed-forwards, and an output whose weight is the embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(FeedForward(dim, 2 * dim) for _ in range(2))
        self.output.weight, self.loss = self.embed.weight, CrossEntropy()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.output(x), targets)  # type: ignore[no-any-return]


def pipeline(name: str, dim: int = 16, without: str = "") -> Recipe:
    """One of `PIPELINES` as a recipe: FSDP over 2 ranks, a model of width `dim`, without one of its passes.

    WorkbenchError for another pipeline, and for a pass that this one does not have.
    """
    if name not in PIPELINES:
        raise WorkbenchError(f"no pipeline {name!r}: one of {', '.join(PIPELINES)}")
    register_model("suspect", sizes={"vocab_size": VOCABULARY, "max_seq_len": LENGTH, "dim": dim},
                   plan=ParallelPlan(units=("layers.*",)))(lambda sizes: Suspect(sizes["dim"]))
    _register()
    joint, pair = PIPELINES[name]
    if without and without not in joint + pair:
        raise WorkbenchError(f"{name} has no pass {without!r}: one of {', '.join(joint + pair)}")
    joint, pair = (tuple(each for each in names if each != without) for names in (joint, pair))
    return load_recipe("llama3").override({
        "name": name, "model.family": "suspect", "mesh.dp_shard": 2, "mesh.tp": 1, "data.seq_len": LENGTH,
        "training.steps": 1, "joint_passes": list(joint), "passes": list(pair)})


def named(answer: Any, *, case: tuple[Sequence[PassRecord], ForwardBackward]) -> tuple[float, str]:
    """Grades (pass, name) against `cause`: the pass alone is half. Records and nodes count as their names.

    A right answer gets the wrong line and its repair, a wrong name what it names instead.

    case: the records of a pipeline, and the pair that its last pass left.
    """
    given: list[Any] = [getattr(name, "name", name) for name in answer] if isinstance(answer, tuple | list) else []
    if len(given) != 2 or not all(isinstance(name, str) for name in given):
        return 0.0, "give two texts: the pass, and what the task asks for"
    records, pair = case
    pipeline = next(name for name, (first, _) in PIPELINES.items() if records[0].name in first)
    culprit, place = cause(pipeline, records, pair.graphs)
    first, second = (name.strip() for name in given)
    if culprit not in (first, second):
        return 0.0, "another pass"
    if culprit != first:
        return 0.0, "the pass comes first, then what the task asks for"
    if second == place:
        return 1.0, f"right: {REPAIRS[pipeline]}"
    record = next(each for each in records if each.name == culprit)
    return 0.5, f"the pass is right, and {second} {_instead(pipeline, second, record, pair)}"


def cause(pipeline: str, records: Sequence[PassRecord], graphs: Sequence[GraphModule] = ()) -> tuple[str, str]:
    """The wrong pass of a checkpoint's pipeline, and the place that the lesson asks for, read from its graphs."""
    by = {record.name: record for record in records}
    if pipeline == "winds":
        return "south", by["south"].options.buckets[-1]
    if pipeline == "stones":
        forward, backward = graphs
        return "coral", max(gathered_parameters_kept(forward, backward), key=lambda row: row.bytes).name
    return "iron", find_nodes(by["iron"].before[0], op=GATHER)[1].name


def _instead(pipeline: str, name: str, record: PassRecord, pair: ForwardBackward) -> str:
    """What a wrong second name names; the lesson's hints react to these words."""
    nodes = {n.name for gm in (*record.after, *pair.graphs) for n in gm.graph.nodes}
    if pipeline == "winds":
        return "is not the wrong path in the options"
    if name not in nodes:
        return "is no node of these graphs"
    if pipeline == "stones":
        kept = {row.name for row in gathered_parameters_kept(pair.forward, pair.backward)}
        return "keeps a gathered weight, but not the largest" if name in kept else "is no such saved tensor"
    starts = [n.name for n in find_nodes(record.before[0], op=GATHER)]
    if name not in starts:
        return "is no all-gather of the forward"
    return "is what rank 0 launches there" if name == starts[0] else "is launched by both ranks at the same place"


class MisspelledPlan(BlockBucketingOptions):
    """Names a module that the model does not have."""

    buckets: tuple[str | tuple[str, ...], ...] = ("layers.0", "layer.1")


def issues_again(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """Each collective of a layer becomes a new node, which knows its value and nothing else."""
    for old in (*find_nodes(gm, op=GATHER), *find_nodes(gm, op=SCATTER)):
        if provenance(old).module.startswith("layers"):
            with gm.graph.inserting_before(old):
                new = gm.graph.call_function(old.target, old.args)  # type: ignore[arg-type]
            new.meta["val"] = old.meta["val"]
            old.replace_all_uses_with(new)
            gm.graph.erase_node(old)
    return gm


def frees_waits(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """Tags gathers and their waits, and not the views behind them, which are saved instead."""
    for start in find_nodes(gm, op=GATHER):
        for node in (start, *start.users):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return gm


def gathers_once(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """The weight that is read twice is gathered once."""
    first, *_, last = (next(iter(n.users)) for n in find_nodes(gm, op=GATHER))
    last.replace_all_uses_with(first)
    for node in (last, last.args[0]):
        gm.graph.erase_node(node)  # type: ignore[arg-type]
    return gm


def fetches_early(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """Fetches the second weight early: beside the first one's gather, on rank 1 before it."""
    starts = find_nodes(gm, op=GATHER)
    if len(starts) > 1:
        _lift(starts[1], starts[0] if dist.get_rank() == 1 else starts[0].next)
    return gm


def _lift(node: Node, target: Node) -> None:
    """Move `node`, and before it what it reads, in front of `target`."""
    for given in node.all_input_nodes:
        if given.op != "placeholder" and target < given:
            _lift(given, target)
    target.prepend(node)


def _badge(name: str, known: str) -> None:
    """The package's pass `known` under another name."""
    found = find_pass(known)
    contract = replace(found.contract, name=name, source="user", after=frozenset(), conflicts=frozenset())
    install_passes([replace(found, contract=contract)])


def _register() -> None:
    for name, known in {
        "elm": "inductor_decomposition", "yew": "transformer_block_bucketing", "north": "inductor_decomposition",
        "east": "reshard_after_forward", "west": "graph_cleanup", "amber": "inductor_decomposition",
        "topaz": "graph_cleanup",
        "zinc": "inductor_decomposition", "lead": "reshard_after_forward", "tin": "graph_cleanup",
    }.items():
        _badge(name, known)
    own: dict[str, tuple[Callable[..., GraphModule], dict[str, Any]]] = {
        "oak": (issues_again, {"stage": "joint"}),
        "south": (transformer_block_bucketing, {
            "stage": "partitioned", "numerics": "reduction_order", "options": MisspelledPlan,
            "effect": fewer_launches}),
        "coral": (frees_waits, {"stage": "joint", "effect": tags_differ}),
        "beryl": (gathers_once, {"stage": "joint", "fewer_bytes": True}),
        "iron": (fetches_early, {"stage": "partitioned"}),
    }
    for name, (function, claim) in own.items():
        register_pass(name, **claim)(function)
