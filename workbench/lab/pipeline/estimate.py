"""A step of all ranks in estimated time: the bubble, what each stage holds, and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field

from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.timeline import costs_of, simulate
from workbench.lab.pipeline.cut import PipelineCut
from workbench.lab.pipeline.phases import StageRun
from workbench.lab.pipeline.plan import Action, Plan, Span
from workbench.lab.pipeline.transform import held_bytes, second_half
from workbench.notebook.draw import Picture
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, LILAC, YELLOW
from workbench.notebook.draw.picture import finish, panels
from workbench.torch_api.ops import own_bytes, tensor_bytes

BARS = {
    "F": ("forward", BLUE), "B": ("backward, whole", GREEN), "I": ("backward: the input", YELLOW),
    "W": ("backward: the weights", LILAC),
}
"""What a legend calls each kind of computation, and its colour."""


@dataclass
class Estimate:
    """spans: the computations of microbatches. live: the most bytes that each stage holds at once for microbatches
    whose backward has not ended, with what they brought. source: of the times.
    """

    plan: Plan = field(repr=False)
    spans: list[Span] = field(repr=False)
    live: list[int]
    source: str

    @property
    def total_ms(self) -> float:
        return max(end for *_, end in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which nothing computes."""
        busy = sum(end - begin for *_, begin, end in self.spans)
        return 1 - busy / (self.total_ms * len(self.plan.ranks))

    @property
    def ideal(self) -> float:
        """(p - 1) / (m + p - 1): the bubble of 1F1B, for stages of equal times and transfers of none."""
        ahead = len(self.plan.ranks) - 1
        return ahead / (self.plan.microbatches + ahead)

    def __repr__(self) -> str:
        lines = [
            f"{self.plan.stages} stages on {len(self.plan.ranks)} ranks, {self.plan.microbatches} "
            f"microbatches: bubble {self.bubble:.1%}, of an ideal 1F1B {self.ideal:.1%}"
        ]
        lines += [
            f"  stage {stage} holds at most {size:,} bytes for microbatches"
            for stage, size in enumerate(self.live)
        ]
        return "\n".join(lines)

    def picture(self) -> Picture:
        """A lane for each rank, grey where it waits, and a bar for each computation with its microbatch."""
        ranks, total = range(len(self.plan.ranks)), self.total_ms
        figure, (axes,) = panels(9.6, 0.9 + 0.45 * len(ranks))
        keys = {"bubble": axes.barh(ranks, total, color=GREY, alpha=0.25)[0]}
        for rank, action, begin, end in self.spans:
            label, color = BARS[action.kind]
            first = action.stage < len(ranks)  # of a rank's two stages
            (bar,) = axes.barh(rank, end - begin, left=begin, color=color, alpha=1 if first else 0.5,
                               edgecolor=GREY, linewidth=0.5)
            keys.setdefault(label, bar)
            if end - begin > total / 80:
                axes.text((begin + end) / 2, rank, f"{action.kind}{action.microbatch}", ha="center", va="center",
                          fontsize=6.5, color="white" if first and action.kind in "FB" else INK)
        axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
        axes.set(ylim=(len(ranks) - 0.45, -0.55), xlim=(0, total), xlabel=f"ms, {self.source}")
        figure.legend(keys.values(), keys, loc="outside upper right", ncols=5, frameon=False)
        return finish(figure, f"A lane of computations for each rank. {self}", str(self), colors=48)


def estimate(cut: PipelineCut, plan: Plan, device: str | DeviceSpec = "h100") -> Estimate:
    """The plan with the stages' times on `device`: kernels one by one, without what runs once a step."""
    spec = device_spec(device)
    ms, adds = dict[tuple[str, int], float](), dict[tuple[str, int], int]()
    for stage in cut.stages:
        run, at = StageRun(stage, cut.of.authored.module, plan.split), stage.number
        graphs = [piece.graph for piece in (run.forwards, *run.backwards)]
        times = [simulate(graph.graph.nodes, costs_of(graph, spec)).end for graph in graphs]
        rows = [row for row in saved_tensors(*stage.pair.graphs) if row.name in run.saved.values()]
        roots = {row.root for row in rows}
        saved = sum(row.held_bytes for row in rows)
        saved += sum(own_bytes(node) for node in run.given if node.name in roots)
        kept = held_bytes(second_half(stage.pair.backward), run.shared)
        ms["F", at], ms["I", at], ms["W", at] = times
        ms["B", at] = sum(times[1:])
        adds["F", at], adds["B", at] = saved, -saved
        adds["I", at], adds["W", at] = kept - saved, -kept

    def send_ms(action: Action) -> float:
        stage = cut.stages[action.stage]
        nodes = stage.sent if action.kind == "SEND_F" else stage.sent_gradients
        # of two ranks, the ring model sends half of the payload
        return spec.sending_ms("send", 2, 2 * sum(tensor_bytes(n.meta["val"]) for n in nodes))

    spans = plan.spans(lambda action: ms[action[:2]], send_ms)[0]
    now, live = [0] * len(cut.stages), [0] * len(cut.stages)
    for _, action, *_ in sorted(spans, key=lambda span: span[2]):
        now[action.stage] += adds[action[:2]]
        live[action.stage] = max(live[action.stage], now[action.stage])
    return Estimate(plan, spans, live, f"simulated on {spec.name}, {spec.trust}")
