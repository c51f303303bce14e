"""Whether compute still hides the collectives, where a pass had put it, at each later stage and in a profile.

The pass that chooses an order states the costs by which it chose (`RegisteredPass.order_costs`). What those costs hide
is held against the graph after each later pass, against the calls in Inductor's code, and against a GPU's profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.fx import GraphModule

from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.callables import kernels_of
from workbench.graph.facts import facts_of
from workbench.graph.read.fused_cost import kernels_ms
from workbench.graph.read.order import Between, between, between_calls
from workbench.graph.read.simulated_run import CPU_LATE, StepTimeline
from workbench.graph.read.timeline import Costs
from workbench.passes.registry import Graphs, RegisteredPass

KEEPS = 0.95
"""The share of the hidden collectives that must stay hidden."""
FAR_LESS = 0.25
"""Of a collective's time: compute below this hides it no more. Estimates of pointwise work differ by less."""
_MORE_WORK = "record and replay the step, or give it more work"


@dataclass
class ChosenOrder:
    """The order that the pass `by` chose for the collectives, by the costs that `costs(graph)` gives.

    hidden: each collective with compute between launch and wait, as "PART NODE", and how many matmuls and attentions
    are there. device: of the costs, and what is known of their error. collectives: how many there are, hidden or not.
    """

    by: str
    costs: Callable[[GraphModule], Costs] = field(repr=False)
    hidden: dict[str, int] = field(repr=False)
    device: str = ""
    collectives: int = 0

    def verdict(self) -> Verdict:
        """How many collectives the order hides; UNKNOWN where it hides none."""
        products = sum(count > 0 for count in self.hidden.values())
        evidence = {
            "hidden": len(self.hidden),
            "with_products": products,
            "collectives": self.collectives,
            "estimated_for": self.device,
        }
        if not self.hidden:
            none = "no collective has a matmul, an attention or enough other compute between its launch and its wait"
            return Verdict("order", Outcome.UNKNOWN, none, evidence)
        text = (
            f"{len(self.hidden)} of {self.collectives} collectives have compute to hide behind, {products} of them a "
            "matmul or an attention"
        )
        return Verdict("order", Outcome.PASS, text, evidence)

    def kept_after(self, graphs: Graphs, where: str = "the graph") -> Verdict:
        """Whether compute hides the collectives in these graphs, called `where`, as the pass had placed it."""
        return _kept(self, _in_graphs(graphs, self.costs), where)

    def kept_in_code(self, graphs: Graphs, compiled: tuple[Any, ...]) -> Verdict:
        """`kept_after` of the code that Inductor made of these graphs, as far as its calls were observed."""
        return _kept(self, _in_code(graphs, compiled, self), "Inductor's code")

    def in_profile(self, step: StepTimeline, ranks: Sequence[Mapping[str, float]] = ()) -> Verdict:
        """Whether compute ran for half of each hidden collective's time or more, in a step that a GPU ran.

        ranks: `times_of` each rank's step. A collective waits for the rank that comes to it last, and no order hides
        that: it is charged with the time that it took on the rank where it took least. UNKNOWN where the CPU was late
        for one collective or, on any rank, for more than half of the step: then the step does not show what its order
        hides.
        """
        spans = {f"{s.part} {s.name}": s for s in step.collectives}
        seen = [name for name in self.hidden if name in spans]
        evidence = {"hidden": len(self.hidden), "seen": len(seen), "chosen_by": self.by}
        if len(seen) < KEEPS * len(self.hidden):
            return Verdict("order", Outcome.UNKNOWN, (
                f"{len(self.hidden) - len(seen)} of {len(self.hidden)} collectives could not be told apart in the "
                "profile"), evidence)
        took = {
            name: min([s.ms, *(times[name] for times in ranks if name in times)])
            for name, s in spans.items()
        }
        exposed = {name: max(0.0, s.exposed - (s.ms - took[name])) for name, s in spans.items()}
        # overlapping ones count once
        once = sum(max(0.0, exposed[name] - s.shared) for name, s in spans.items())
        alone = [name for name in seen if exposed[name] > 0.5 * took[name]]
        bare = [name for name in alone if spans[name].limit != CPU_LATE]
        late = len(alone) - len(bare)
        waited = max(0.0, step.total_ms - step.compute_ms - once)
        kept = f"{len(seen) - len(alone)} of {len(seen)} collectives ran behind compute ({step.source})"
        evidence |= {"lost": len(bare), "late": late, "exposed_ms": round(once, 3),
                     "idle_ms": round(waited, 3)}
        if len(seen) - len(alone) >= KEEPS * len(seen):
            return Verdict("order", Outcome.PASS, kept, evidence)
        if waited > 0.5 * step.total_ms:
            return Verdict("order", Outcome.UNKNOWN, (
                f"{kept}; for {waited:.1f} of the step's {step.total_ms:.1f} ms the GPU neither computed nor "
                f"communicated: it waited for a CPU: {_MORE_WORK}"), evidence)
        if len(seen) - len(bare) >= KEEPS * len(seen):
            return Verdict("order", Outcome.UNKNOWN, (
                f"{kept}; {late} were over before the CPU had launched the compute behind them: {_MORE_WORK}"
            ), evidence)
        return Verdict("order", Outcome.FAIL, (
            f"{kept}, where {self.by} had hidden {len(seen)}; the first exposed one is {bare[0]}, for "
            f"{exposed[bare[0]]:.3f} of its {took[bare[0]]:.3f} ms"), evidence | {"first": bare[0]})


def chosen_by(item: RegisteredPass, graphs: Graphs, options: Any) -> ChosenOrder:
    """The order of the collectives that a pass chose in `graphs`, by the costs that it states."""
    assert item.order_costs is not None
    costs = partial(item.order_costs, options)
    spec, places = costs(graphs[0]).spec, _in_graphs(graphs, costs)
    hidden = {place: value.products for place, value in places.items() if value.hides}
    return ChosenOrder(item.name, costs, hidden, f"{spec.name}, {spec.trust}", len(places))


def _in_graphs(graphs: Graphs, costs: Callable[[GraphModule], Costs]) -> dict[str, Between]:
    return {
        f"{facts_of(g).part} {name}": value
        for g in graphs
        for name, value in between(g, costs(g)).items()
    }


def _in_code(graphs: Graphs, compiled: Graphs, order: ChosenOrder) -> dict[str, Between]:
    by_name: dict[str, Between] = {}
    # none where nothing was observed
    for graph, kernels in zip(graphs, kernels_of(graphs, compiled), strict=False):
        costs = order.costs(graph)
        needed = {node.name: ms for node, ms in costs.collective.items()}
        times = kernels_ms(kernels, graph, costs.spec)
        by_name |= {f"{facts_of(graph).part} {name}": value
                  for name, value in between_calls(kernels, graph, times, needed).items()}
    return by_name


def _kept(order: ChosenOrder, now: Mapping[str, Between], where: str) -> Verdict:
    seen = [name for name in order.hidden if name in now]
    evidence = {"hidden": len(order.hidden), "seen": len(seen), "chosen_by": order.by}
    if len(seen) < KEEPS * len(order.hidden):
        unseen = f"Inductor's calls of {len(order.hidden) - len(seen)} of {len(order.hidden)} collectives"
        return Verdict("order", Outcome.UNKNOWN, f"{unseen} were not observed", evidence)
    bare = []
    for name in seen:
        too_little = order.hidden[name] or now[name].ms < FAR_LESS * now[name].needed_ms
        if not now[name].products and too_little:
            bare.append(name)
    evidence["lost"] = len(bare)
    kept = f"{len(seen) - len(bare)} of {len(seen)} collectives hide in {where} behind compute"
    if len(seen) - len(bare) >= KEEPS * len(seen):
        return Verdict("order", Outcome.PASS, f"{kept}, as {order.by} has placed it", evidence)
    first = now[bare[0]]
    return Verdict("order", Outcome.FAIL, (
        f"{kept}, where {order.by} had hidden {len(seen)}; the first lost one is {bare[0]}, with {first.ms:.3f} ms of "
        f"compute for its {first.needed_ms:.3f} ms, and {first.products} matmuls or attentions (estimated for "
        f"{order.device})"), evidence | {"first": bare[0]})


def times_of(step: StepTimeline) -> dict[str, float]:
    """Milliseconds of each collective that was told apart in a measured step."""
    return {f"{s.part} {s.name}": s.ms for s in step.collectives if s.part}
