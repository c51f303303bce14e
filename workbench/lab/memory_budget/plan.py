"""What torch's partitioner saves and repeats under its own budgets, and the search for the one that fits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of, set_facts
from workbench.graph.read.cost import device_spec
from workbench.graph.read.memory import item_roots, roots, saved_tensors
from workbench.graph.read.nodes import is_backward, is_compute, kind_of, may_differ, module_path
from workbench.graph.read.peak import step_peak
from workbench.graph.read.timeline import costs_of
from workbench.lab.memory_budget import BudgetOptions
from workbench.recipe.wording import aligned
from workbench.torch_api import aot, partitioning
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.ops import own_bytes, short_name

Act = Literal["save", "recompute", "not needed"]
BUDGET = "activation_memory_budget"
"""Of torch._functorch.config, as are the solver and the estimator of times."""
SHARES = (*(i / 20 for i in range(20, 0, -1)), 1e-6)
"""The budgets of torch that are tried. At 0 it would repeat collectives, too."""
_FREE = "view", "bookkeeping", "wait"
_BLOCK = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True)
class Cut:
    """A joint graph, partitioned. share: torch's budget for it.

    saved: bytes of each tensor that the forward keeps for the backward, by the node that owns its memory; inputs are
    left out. again: the forward's operators that the backward repeats, but views, with the milliseconds of products and
    attention, and 0 for what a compiler fuses. compute_ms: of both graphs, fused, without communication. peak: bytes of
    a step of these graphs, if a compiler follows. Times and peak are estimates.
    """

    share: float
    saved: Mapping[str, int] = field(repr=False)
    again: Mapping[str, float] = field(repr=False)
    compute_ms: float
    peak: int

    @property
    def bytes(self) -> int:
        return sum(self.saved.values())


@dataclass(frozen=True)
class Choice:
    """One tensor. act, before: what is done about it, with the budget and without. ms: of its operator, if that is a
    product or an attention that is repeated; 0 for a second result of it.
    """

    name: str
    module: str
    operator: str
    bytes: int
    act: Act
    before: Act
    ms: float


@dataclass(frozen=True)
class MemoryPlan:
    """budget: bytes that may be saved. before, cut: what torch saves without a budget, and within it. device: of the
    times.
    """

    budget: int
    before: Cut
    cut: Cut
    device: str
    choices: tuple[Choice, ...] = field(repr=False)

    @property
    def ms(self) -> float:
        """How much longer the step computes than without the budget."""
        return self.cut.compute_ms - self.before.compute_ms

    @property
    def summary(self) -> str:
        return (f"saves {self.cut.bytes:,} bytes of a budget of {self.budget:,}, where torch's "
                f"activation_memory_budget is {self.cut.share:.4g}, and computes for "
                f"{self.ms:.4g} ms longer on {self.device}")

    def __str__(self) -> str:
        """The plan as a table; alike layers that are treated alike share a row."""
        head = ("first tensor", "number", "module", "operator", "bytes", "choice", "without", "ms")
        rows = [(row.name, str(number), row.module, row.operator, f"{row.bytes:,}", row.act, row.before,
                 f"{row.ms:.4g}") for row, number in alike(self.choices)]
        both = front_table({"without a budget": self.before, "the plan": self.cut})
        return "\n".join([self.summary, *both, "", *aligned([head, *rows], (1, 4, 7))])


def front_table(cuts: Mapping[str, Cut]) -> list[str]:
    """Bytes, predicted peak and milliseconds of each cut, as aligned lines."""
    rows = [(name, f"{cut.bytes:,}", f"{cut.peak:,}", f"{cut.compute_ms:.4g}")
            for name, cut in cuts.items()]
    return aligned([("", "saved bytes", "predicted peak", "compute ms"), *rows], (1, 2, 3))


def alike(choices: Iterable[Choice]) -> list[tuple[Choice, int]]:
    """Tensors of several layers that agree in all but the layer, such as `layers.*.attention`, as one row with their
    bytes and ms together, and their number.
    """
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for row in choices:
        row = replace(row, module=_BLOCK.sub("*", row.module, count=1))
        groups.setdefault((row.module, row.operator, row.act, row.before), []).append(row)
    return [(replace(rows[0], bytes=sum(row.bytes for row in rows), ms=sum(row.ms for row in rows)), len(rows))
            for rows in groups.values()]


def make_plan(gm: GraphModule, options: BudgetOptions) -> MemoryPlan:
    """The cut of the largest of SHARES whose bytes fit into the budget.

    What may draw random numbers is tagged to be saved: under a budget torch would draw again. Raises WorkbenchError
    where torch's smallest cut does not fit.
    """
    for node in gm.graph.nodes:
        if "recompute" not in node.meta and not is_backward(node) and may_differ(node, options.recomputable):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    before = torch_cut(gm, options, 1.0)
    budget = options.bytes(before.bytes)
    cut = before if before.bytes <= budget else _search(gm, options, budget)
    spec = device_spec(options.device)
    choices = tuple(_choices(gm, before, cut))
    return MemoryPlan(budget, before, cut, f"{spec.name}, {spec.trust}", choices)


def _search(gm: GraphModule, options: BudgetOptions, budget: int) -> Cut:
    """By halving: a larger share saves more bytes."""
    too_much, fitting = 0, len(SHARES) - 1
    fits = torch_cut(gm, options, SHARES[fitting])
    if fits.bytes > budget:
        modules = {node.name: module_path(node) or "no module" for node in gm.graph.nodes}
        largest = sorted(fits.saved.items(), key=lambda item: -item[1])[:4]
        text = ", ".join(f"{name} of {modules[name]} ({size:,} bytes)" for name, size in largest)
        raise WorkbenchError(
            f"memory_budget: a budget of {budget:,} bytes is less than the {fits.bytes:,} that "
            f"torch's smallest cut saves; most of it holds {text}: give a larger budget, or list "
            "reshard_after_forward before it, if these are gathered weights")
    while fitting - too_much > 1:
        middle = (too_much + fitting) // 2
        cut = torch_cut(gm, options, SHARES[middle])
        if cut.bytes > budget:
            too_much = middle
        else:
            fitting, fits = middle, cut
    return fits


@uncollected()
def torch_cut(gm: GraphModule, options: BudgetOptions, share: float) -> Cut:
    """What torch's minimum cut makes of the graph, which stays as it is, under this budget."""
    graph = aot.clone(gm)
    gradients = [
        aot.gradient_of(desc) is not None for desc in graph.graph.output_node().meta["desc"]
    ]
    results = gradients.index(True) if True in gradients else len(gradients)
    forward, backward = partitioning.cut(graph, results, {BUDGET: share})
    set_facts(forward, facts_of(gm).of("forward"))
    set_facts(backward, facts_of(gm).of("backward"))
    return read_cut((forward, backward), options, share)


def read_cut(graphs: tuple[GraphModule, ...], options: BudgetOptions, share: float) -> Cut:
    """graphs: forward and backward, as a partitioner has made them."""
    forward, backward = graphs
    owner = item_roots(forward, roots(forward))
    named = {node.name: node for node in forward.graph.nodes}
    saved = {owner[named[row.name]].name: row.held_bytes
             for row in saved_tensors(forward, backward) if row.held_bytes}
    ahead, behind = (costs_of(gm, options.device, fused=True).compute for gm in graphs)
    again = {}
    for node, ms in behind.items():
        if node.op == "call_function" and node.name in named and kind_of(node) not in _FREE:
            again[node.name] = ms if is_compute(node) else 0.0
    peak = step_peak((forward, backward), fused=True, gpu=True)
    return Cut(share, saved, again, sum(ahead.values()) + sum(behind.values()), peak.bytes)


def _choices(gm: GraphModule, before: Cut, cut: Cut) -> Iterable[Choice]:
    """A row for each tensor that is saved, with the budget or without, and for what is repeated."""
    operator = roots(gm)
    owner = item_roots(gm, operator)
    unpriced = dict(cut.again)
    for node in gm.graph.nodes:
        source, value = operator[node], node.meta.get("val")
        if owner[node] is not node or not isinstance(value, torch.Tensor):
            continue
        if node.name in before.saved or node.name in cut.saved or source.name in cut.again:
            yield Choice(node.name, module_path(node), short_name(source), own_bytes(node),
                         _act(node, source, cut), _act(node, source, before),
                         unpriced.pop(source.name, 0.0))


def _act(node: Node, source: Node, cut: Cut) -> Act:
    if node.name in cut.saved:
        return "save"
    return "recompute" if source.name in cut.again else "not needed"
