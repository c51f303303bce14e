"""Inputs, memory and launches of a CUDA graph of one direction, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from workbench.graph.read.kernels import Kernels
from workbench.graph.read.nodes import kind_of
from workbench.recipe.wording import counted

_STARTS_NOTHING = ("view", "bookkeeping", "wait")


@dataclass(frozen=True)
class ReplayInput:
    """An input tensor. static: read at its own address; else copied into the graph's memory before each replay.

    bytes: of its elements. parameter: its qualified name, "" for other inputs. address: the one that the recording
    reads; None before a recording and on a CPU.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    static: bool
    parameter: str = ""
    address: int | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Replay:
    """One direction of the step as a CUDA graph.

    pool_bytes: memory of the pool, which forward and backward share, after this recording; None before it.
    launches_before: number of launches of one call without a replay, counted in `unit`; a replay is one, without the
    copies of inputs before it and of results after it. replays: so far.
    """

    graph: str
    inputs: tuple[ReplayInput, ...] = field(repr=False)
    pool_bytes: int | None
    launches_before: int
    unit: str
    replays: int = 0

    @property
    def static(self) -> list[ReplayInput]:
        return [x for x in self.inputs if x.static]

    @property
    def copied(self) -> list[ReplayInput]:
        return [x for x in self.inputs if not x.static]

    def __repr__(self) -> str:
        return f"Replay({self.summary()})"

    def summary(self) -> str:
        """One line: counts and bytes."""
        def text(inputs: list[ReplayInput], word: str) -> str:
            return (
                f"{counted(len(inputs), 'input')} {word} ({sum(x.bytes for x in inputs):,} bytes)"
            )

        pool = "not recorded yet" if self.pool_bytes is None else f"pool {self.pool_bytes:,} bytes"
        return (
            f"{self.graph}: {text(self.static, 'static')}, {text(self.copied, 'copied')}; {pool}; "
            f"{self.launches_before:,} {self.unit} before, 1 launch after"
        )


def count_launches(graph: GraphModule, kernels: Kernels | None) -> tuple[int, str]:
    """(count, unit): kernel calls where Inductor compiled the body, else operators that launch work.

    Both are lower bounds: a library call or an operator may launch several kernels.
    """
    if kernels is not None and kernels.kernels:
        return kernels.launches, "calls of kernels"
    return sum(map(starts_work, graph.graph.nodes)), "operators"


def starts_work(node: Node) -> bool:
    """Whether the node launches work on the device. Views, sizes and waits do not."""
    return node.op == "call_function" and kind_of(node) not in _STARTS_NOTHING
