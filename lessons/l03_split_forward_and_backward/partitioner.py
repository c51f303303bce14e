"""Be the partitioner: save a tensor or compute it again, and compare with the minimum cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from typing import Any

import traitlets
from ipywidgets import Checkbox
from torch.utils.checkpoint import CheckpointPolicy

from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward, partition
from workbench.graph.read.cost import flops
from workbench.graph.read.memory import roots, saved_tensors
from workbench.notebook.draw.colors import INK, LILAC
from workbench.notebook.draw.picture import Picture
from workbench.pipeline.run_passes import copy_graph
from workbench.torch_api.ops import own_bytes
from workbench_lessons.course.dataflow import dataflow, places
from workbench_lessons.course.grading import Graded, targets
from workbench_lessons.course.moment import Moment

MOST = 6
BUDGETS = tuple(i / 10 for i in range(11))


class Partitioner(Moment):
    """A small joint graph. Each tensor of `names` (node to the name that is shown) is saved or computed again.

    `saved`: the nodes that are saved now; at first `start`, or without it those that the backward reads. `figures`:
    bytes saved, and FLOP of products computed again. `reveal`: show torch's two partitioners, and the curve of the
    memory budget. All choices are cut when the view is made.
    """

    saved = traitlets.List(traitlets.Unicode()).tag(sync=True)
    reveal = traitlets.Bool().tag(sync=True)

    def __init__(self, joint: JointGraph, names: Mapping[str, str], title: str = "be the partitioner", *,
                 start: Collection[str] | None = None):
        known = {n.name for n in joint.graph.graph.nodes}
        if unknown := [name for name in names if name not in known]:
            raise WorkbenchError(f"the joint graph has no node {unknown[0]!r}: print(joint) lists its nodes")
        if len(names) > MOST:
            raise WorkbenchError(f"{len(names)} tensors make {2 ** len(names):,} cuts: name at most {MOST}")
        self._joint, self.names = joint, dict(names)
        cost = Costs(joint)
        self.cuts = {kept: cost.of(cut_by_hand(joint, dict.fromkeys(names, False) | dict.fromkeys(kept, True)))
                     for kept in _choices(names)}
        self.read = _held(cut_by_hand(joint, dict.fromkeys(names, True)), names)
        self.first = self.read if start is None else [name for name in names if name in start]
        marked = {title: cost.marked(joint, by, names) for title, by in (
            ("minimum cut", "min_cut"), ("default", "default"))}
        budgets = [cost.of(_with_budget(joint, share)) for share in BUDGETS]
        super().__init__("partitioner", title, self._drawing() | {
            "cuts": [[list(kept), *found] for kept, found in self.cuts.items()], "marked": marked,
            "budgets": [[share, *found] for share, found in zip(BUDGETS, budgets, strict=True)]}, saved=self.first)
        self.add(self.link("reveal", Checkbox(description="reveal torch's cuts and the budget's curve", indent=False)),
                 self.setting("start again", saved=self.first))

    @traitlets.observe("saved")
    def _chosen(self, change: Any) -> None:
        if unknown := [name for name in change.new if name not in self.names]:
            self.message, self.figures = (f"{unknown[0]!r} is none of the tensors that can be saved: "
                                          f"{', '.join(self.names)}"), {}
            return
        kept = tuple(name for name in self.names if name in change.new)
        self.message, self.figures = "", dict(zip(("bytes saved", "FLOP again"), self.cuts[kept], strict=True))

    def picture(self) -> Picture:
        """The board as it is at first."""
        graph = copy_graph(self._joint.graph)  # a node's name is written on its box
        states = {}
        for node in graph.graph.nodes:
            if label := self.names.get(node.name):
                states[node] = "saved" if node.name in self.first else "not saved"
                node.name = label if label == node.name else f"{label} ({node.name})"
        return dataflow(graph, self.title, views=False, rest="no choice", name_of=lambda node: states.get(node, ""),
                        palette={"saved": INK, "not saved": LILAC})

    def _drawing(self) -> dict[str, Any]:
        gm = self._joint.graph
        at, arrows = places(gm, roots(gm))
        place = {node: i for i, node in enumerate(at)}
        return {"boxes": [[n.name, self.names.get(n.name, ""), x, y, own_bytes(n), n.op == "placeholder"]
                          for n, (x, y) in at.items()],
                "arrows": [[place[a], place[b]] for a, b in arrows]}


class Costs:
    """What a cut keeps and repeats, beside the cut that repeats nothing."""

    def __init__(self, joint: JointGraph):
        self._once = self._flop(partition(joint.fork(), by="default"))

    def of(self, pair: ForwardBackward) -> tuple[int, int]:
        """(bytes that saving adds, FLOP of products computed again)"""
        return sum(row.held_bytes for row in saved_tensors(*pair.graphs)), self._flop(pair) - self._once

    def marked(self, joint: JointGraph, by: str, names: Collection[str]) -> list[Any]:
        """[nodes saved, bytes, FLOP] of one of torch's partitioners."""
        pair = partition(joint.fork(), by=by)
        return [_held(pair, names), *self.of(pair)]

    @staticmethod
    def _flop(pair: ForwardBackward) -> int:
        return int(sum(sum(flops(gm).values()) for gm in pair.graphs))


def _held(pair: ForwardBackward, names: Collection[str]) -> list[str]:
    """Those of the names that the forward saves for the backward."""
    held = {name for row in saved_tensors(*pair.graphs) for name in (row.name, row.root)}
    return [name for name in names if name in held]


def cut_by_hand(joint: JointGraph, kept: Mapping[str, bool]) -> ForwardBackward:
    """Forward and backward, where the nodes of these names are saved (True) or computed again (False)."""
    fork = joint.fork()
    fork.graph = copy_graph(joint.graph)  # tags are written into the graph
    for node in fork.graph.graph.nodes:
        if node.name in kept:
            node.meta["recompute"] = CheckpointPolicy["MUST_SAVE" if kept[node.name] else "MUST_RECOMPUTE"]
    return partition(fork)


def _with_budget(joint: JointGraph, share: float) -> ForwardBackward:
    fork = joint.fork()
    fork.graph = copy_graph(joint.graph)
    facts_of(fork.graph).partition_options["activation_memory_budget"] = share
    return partition(fork)


def _choices(names: Collection[str]) -> list[tuple[str, ...]]:
    return [tuple(name for name, kept in zip(names, chosen, strict=True) if kept)
            for chosen in product((True, False), repeat=len(names))]


def cut(answer: Any, *, board: Partitioner) -> Graded:
    """The tensors that are saved (a board, names, or {name: saved or not}): as few bytes as repeat no matmul.

    A cut with the costs of the first one, or of the default partitioner's, is told no target: that would be the answer.
    """
    names = list(board.names)
    saved = answer.saved if isinstance(answer, Partitioner) else answer
    if isinstance(saved, Mapping):
        if missing := [name for name in names if name not in saved]:
            return 0.0, f"say of {missing[0]!r} whether it is saved: give {', '.join(names)}"
        unknown = [name for name in saved if name not in names]
        saved = [name for name in names if saved[name]]
    elif isinstance(saved, list | tuple | set):
        unknown = [name for name in saved if name not in names]
    else:
        return 0.0, "give the board, or the names of the saved tensors"
    if unknown:
        return 0.0, f"{unknown[0]!r} is none of the tensors of this board: {', '.join(names)}"
    kept = tuple(name for name in names if name in saved)
    found, first, read = (board.cuts[tuple(names)] for names in (kept, board.first, board.read))
    least = min(size for size, again in board.cuts.values() if not again)
    if found in (first, read) and found != (least, 0):
        told = f"FLOP again {found[1]:,}" if found[1] else f"bytes saved {found[0]:,}"
        return 0.0, f"{told}, as {'at the start' if found == first else 'many as for all that is read'}"
    got, limits, start = (
        dict(zip(("bytes saved", "FLOP again"), each, strict=True)) for each in (found, (least, 0), read)
    )
    return targets(got, at_most=limits, start=start)
