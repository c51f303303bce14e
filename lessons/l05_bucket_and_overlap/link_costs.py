"""What collectives cost, the tokens that hide them, and the grader that asks for these tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from workbench.graph.read.collectives import Collective, list_collectives
from workbench.graph.read.cost import DeviceSpec, node_flops, node_ms
from workbench.graph.read.nodes import kind_of, module_path
from workbench.torch_api.devices.profile import MeasuredSpec
from workbench_lessons.course.grading import close


@dataclass(frozen=True)
class ModuleCosts:
    """What a module's matmuls and collectives take, each one after another, in forward and backward together.

    gather_ms, scatter_ms: times of its all-gathers and of all its other collectives; sent_bytes: their payload.
    """

    flop: float
    matmul_ms: float
    gather_ms: float
    scatter_ms: float
    sent_bytes: float

    @property
    def sent_ms(self) -> float:
        return self.gather_ms + self.scatter_ms

    @property
    def tflops(self) -> float:
        """1e12 FLOP/s of the matmuls."""
        return self.flop / self.matmul_ms / 1e9

    @property
    def gbps(self) -> float:
        """1e9 bytes/s of payload, latency included."""
        return self.sent_bytes / self.sent_ms / 1e6

    @property
    def tokens(self) -> float:
        """FLOP/s over bytes/s: from so many on, matmuls outlast collectives of 6 bytes a weight."""
        return 1e3 * self.tflops / self.gbps


def costs_of_module(graphs: Iterable[GraphModule], spec: DeviceSpec, module: str = "") -> ModuleCosts:
    """The costs of the module whose path begins with `module`; of the whole model by default."""
    flop = matmul_ms = 0.0
    collectives: list[Collective] = []
    for graph in graphs:
        for node in graph.graph.nodes:
            if kind_of(node) == "matmul" and module_path(node).startswith(module):
                flop += node_flops(node)
                matmul_ms += node_ms(node, spec)
        collectives += [c for c in list_collectives(graph) if c.module.startswith(module)]
    gather_ms = sent_ms((c for c in collectives if c.kind == "all_gather"), spec)
    sent_bytes = sum(c.payload for c in collectives)
    return ModuleCosts(flop, matmul_ms, gather_ms, sent_ms(collectives, spec) - gather_ms, sent_bytes)


def sent_ms(collectives: Iterable[Collective], spec: DeviceSpec) -> float:
    """How long these collectives take one after another."""
    return sum(spec.sending_ms(c.kind, c.group_size, c.payload) for c in collectives)


def hides(answer: Any, *, layer: ModuleCosts, tokens: int, spec: MeasuredSpec) -> tuple[float, str]:
    """Grades the tokens for which the matmuls of a layer, measured for `tokens`, last as long as its collectives.

    The answer may be off by three times the machine's error for compute. The message names two likely mistakes:
    matmuls of the forward alone, and gathers alone.
    """
    assert spec.profile is not None
    truth = tokens * layer.sent_ms / layer.matmul_ms
    return _named(answer, truth, {
        "about three times the tokens": 3 * truth,
        "tokens for the gathers alone": truth * layer.gather_ms / layer.sent_ms,
        "a weight that is gathered once": layer.tokens,
    }, within=3 * spec.profile.errors["compute"], near=0.1)


def _named(answer: Any, truth: float, mistakes: Mapping[str, float], *, within: float,
           near: float = 0.02) -> tuple[float, str]:
    """Grades a number as right or wrong: a share of the truth would give it away. The message names a likely mistake.

    mistakes: by message, the number that it leads to.
    """
    score, message = close(answer, truth=truth, within=within)
    if score >= 1:
        return 1.0, message
    for mistake, wrong in mistakes.items():
        if close(answer, truth=wrong, within=near)[0] >= 1:
            return 0.0, mistake
    return 0.0, message
