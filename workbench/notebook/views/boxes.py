"""The drawing of a graph with some modules open: boxes, the links between them, and folded blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from workbench.notebook.views.graph_tree import Block, GraphTree
from workbench.torch_api.aot import parameter_of
from workbench.torch_api.ops import hint, op_name, tensor_bytes

BOX_LIMIT = 1500


class Box(NamedTuple):
    """A module (with `nodes` operators and inputs, and `alike` identical blocks folded into it) or one operator.

    `id` is the path in the tree, `parent` the id of the open module around it, "" at the top. `kinds` counts the
    operators by kind, and inputs as `input`; `marks` counts them by what a pass did to them.
    """

    id: str
    parent: str
    label: str
    kind: str
    nodes: int
    alike: int = 1
    open: bool = False
    kinds: dict[str, int] = {}  # noqa: RUF012
    marks: dict[str, int] = {}  # noqa: RUF012


class Link(NamedTuple):
    """`values` that one box passes to another. `saved`: from forward to backward, with their `bytes`."""

    source: str
    target: str
    values: int
    saved: bool
    bytes: int


@dataclass(frozen=True)
class View:
    """The boxes and links of a tree with some modules open. `note` says what is left out."""

    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    note: str = ""


def draw(tree: GraphTree, opened: Collection[str] = (), fold: bool = True) -> View:
    """The boxes when the modules `opened` (their ids) are open; at most BOX_LIMIT."""
    drawing = Drawing(tree, set(opened), fold)
    drawing.fill(tree.root, "")
    return drawing.view()


class Drawing:
    """Builds one View: its boxes, and the box of each node."""

    def __init__(self, tree: GraphTree, opened: set[str], fold: bool):
        self.tree, self.opened, self.fold = tree, opened, fold
        self.boxes: list[Box] = []
        self.owner: dict[int, str] = {}
        # of nodes in an open box that represents several blocks
        self.member: dict[int, tuple[str, int]] = {}
        self.shut = 0

    def fill(self, block: Block, parent: str) -> None:
        for group in self._groups(block):
            first, every = group[0], [member.every() for member in group]
            label = first.name if len(group) == 1 else f"{first.name}-{group[-1].name}"
            inside = len(first.children) + len(first.leaves)
            is_open = first.path in self.opened
            if is_open and len(self.boxes) + inside > BOX_LIMIT:
                is_open, self.shut = False, self.shut + 1
            indices = [i for member in every for i in member]
            self.boxes.append(Box(first.path, parent, label, "module", len(indices), len(group), is_open,
                                  _count(self.tree.kinds[i] for i in indices), self._marks(indices)))
            if not is_open:
                self.owner.update(dict.fromkeys(indices, first.path))
                continue
            self.fill(first, first.path)
            if len(group) > 1:
                self._stand_in(first.path, every)
        for i in block.leaves:
            node = self.tree.nodes[i]
            kind = self.tree.kinds[i]
            label = (
                (parameter_of(node) or node.name).rpartition(".")[2]
                if kind == "input"
                else node.name
            )
            self.boxes.append(
                Box(self.tree.id_of[i], parent, label, kind, 1, marks=self._marks([i]))
            )
            self.owner[i] = self.tree.id_of[i]

    def _marks(self, indices: list[int]) -> dict[str, int]:
        if not self.tree.marks:
            return {}
        return _count(m for i in indices if (m := self.tree.marks.get(self.tree.nodes[i].name)))

    def _groups(self, block: Block) -> list[list[Block]]:
        groups: list[list[Block]] = []
        for child in block.children.values():
            last = groups[-1][-1] if groups else None
            if (self.fold and last and child.name.isdigit() and last.name.isdigit()
                    and self._sign(last) == self._sign(child)):
                groups[-1].append(child)
            else:
                groups.append([child])
        return groups

    def _sign(self, block: Block) -> Any:
        """Equal for blocks with the same operators on the same shapes in the same modules, in any order."""
        if block._sign is None:
            faces = Counter(map(_face, (self.tree.nodes[i] for i in block.leaves)))
            inner = tuple((child.name, self._sign(child)) for child in block.children.values())
            block._sign = hash((frozenset(faces.items()), inner))
        return block._sign

    def _stand_in(self, path: str, every: list[list[int]]) -> None:
        """Let the first block's nodes represent the corresponding nodes of the others."""
        nodes, depth = self.tree.nodes, path.count("/") + 1
        like: dict[Any, list[int]] = {}
        for i in every[0]:
            like.setdefault((self._within(i, depth), _face(nodes[i])), []).append(i)
        for number, member in enumerate(every):
            turn: Counter[Any] = Counter()
            for i in member:
                self.member[i] = (path, number)
                if number:
                    key = (self._within(i, depth), _face(nodes[i]))
                    twins = like.get(key, [every[0][0]])
                    self.owner[i] = self.owner[twins[min(turn[key], len(twins) - 1)]]
                    turn[key] += 1

    def _within(self, i: int, depth: int) -> tuple[str, ...]:
        """The modules of a node below the block that is `depth` names deep."""
        return tuple(self.tree.id_of[i].split("/")[depth:-1])

    def view(self) -> View:
        crossings: dict[tuple[str, str, bool], list[int]] = {}
        owner, tree = self.owner, self.tree
        for i, sources in enumerate(tree.inputs):
            for j in sources:
                a, b = owner[j], owner[i]
                if a == b or b.startswith(f"{a}/") or a.startswith(f"{b}/"):
                    continue
                mine, other = self.member.get(j), self.member.get(i)
                if mine and other and mine[0] == other[0] and mine[1] != other[1]:
                    continue  # from one of the folded blocks to the next
                crossings.setdefault((a, b, tree.parts[i] != tree.parts[j]), []).append(j)
        links = tuple(
            Link(a, b, len(js), saved, tensor_bytes([tree.nodes[j].meta.get("val") for j in set(js)]) if saved else 0)
            for (a, b, saved), js in crossings.items())
        note = (
            f"{self.shut} modules stay shut: {BOX_LIMIT:,} boxes are the most that is drawn"
            if self.shut
            else ""
        )
        return View(tuple(self.boxes), links, note)


def _face(node: Node) -> tuple[str, tuple[int, ...]]:
    value = node.meta.get("val")
    name = op_name(node.target) if node.op == "call_function" else node.op
    if not isinstance(value, torch.Tensor):
        return name, ()
    return name, tuple([s if type(s) is int else hint(s) for s in value.shape])


def _count(items: Any) -> dict[str, int]:
    return dict(Counter(items).most_common())
