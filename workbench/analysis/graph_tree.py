"""A graph as a tree of modules: what is collapsed is one box, and identical blocks side by side are one box, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from workbench.analysis.census import kind_of, module_path, provenance
from workbench.forward_backward import saved_nodes
from workbench.torch_api.aot import is_tangent, parameter_of
from workbench.torch_api.ops import hint, op_name, tensor_bytes

BOX_LIMIT = 1500
CHUNK = 200
"""So many operators without a module of their own stand in one box."""


class Box(NamedTuple):
    """What is drawn: a module (`nodes` operators in it, `alike` blocks of its kind folded) or one operator.

    `id` is the path in the tree, `parent` the id of the open module around it, "" at the top. `kinds` counts its
    operators by kind. `marks` counts what a pass did to them.
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
    """`values` that one box hands to another; `saved` of the forward, `bytes` of them, wait for the backward."""

    source: str
    target: str
    values: int
    saved: bool
    bytes: int


@dataclass(frozen=True)
class View:
    """The boxes and links of a tree with some modules open. `note` says what was left out."""

    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    note: str = ""


@dataclass
class Block:
    """A module, or a part of the graph, and what lies in it: places in `GraphTree.nodes`."""

    path: str
    name: str
    children: dict[str, Block] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    _sign: Any = None

    def every(self) -> Iterator[int]:
        yield from self.leaves
        for child in self.children.values():
            yield from child.every()


class GraphTree:
    """Graphs (by part: `forward` and `backward`, or one of any kind) as one tree of modules.

    A joint graph is parted by its nodes' tags. A backward's saved inputs are drawn as links from the forward's nodes.
    `missing` says what the graph's metadata does not tell. `marks`: what a pass did, by node name.
    """

    def __init__(self, graphs: Mapping[str, GraphModule], marks: Mapping[str, str] | None = None):
        self.marks = marks or {}
        self.nodes: list[Node] = []
        self.parts: list[str] = []
        self.inputs: list[list[int]] = []
        self.root = Block("", "")
        self.crossing: set[int] = set()
        self._find: list[str] | None = None
        place: dict[Node, int] = {}
        if {"forward", "backward"} <= graphs.keys():
            place = self._add(graphs["forward"], "forward", place)
            taken = [n for n in graphs["backward"].graph.find_nodes(op="placeholder") if not is_tangent(n)]
            kept = saved_nodes(graphs["forward"], graphs["backward"])
            place |= {late: place[early] for late, early in zip(taken, kept, strict=True) if early in place}
            self._add(graphs["backward"], "backward", place)
        else:
            for part, gm in graphs.items():
                place = self._add(gm, part, place)
        _chunk(self.root)
        self.id_of = [""] * len(self.nodes)
        self.named: dict[str, int] = {}
        for block in _blocks(self.root):
            for i in block.leaves:
                self.id_of[i] = f"{block.path}/{self.nodes[i].name}"
                self.named[self.id_of[i]] = i
        self.missing = self._missing()

    def _add(self, gm: GraphModule, part: str, place: dict[Node, int]) -> dict[Node, int]:
        joint = part == "joint"
        for node in gm.graph.nodes:
            if node.op == "output" or node in place or (node.op == "placeholder" and not node.users):
                continue  # a mesh, that is
            later = joint and node.meta.get("partitioner_tag") == "is_backward"
            if joint and node.op == "placeholder":
                later = is_tangent(node)
            here = ("backward" if later else "forward") if joint else part
            path = parameter_of(node) if node.op == "placeholder" else module_path(node)
            names = path.split(".") if path else ["inputs"] if node.op == "placeholder" else []
            place[node] = i = len(self.nodes)
            self.nodes.append(node)
            self.parts.append(here)
            given = [place[n] for n in node.all_input_nodes if n in place]
            self.inputs.append(given)
            if here == "backward":
                self.crossing.update(j for j in given if self.parts[j] == "forward")
            block = self.root
            for name in (here, *(names[:-1] if node.op == "placeholder" and path else names)):
                if (child := block.children.get(name)) is None:
                    child = block.children[name] = Block(f"{block.path}/{name}" if block.path else name, name)
                block = child
            block.leaves.append(i)
        return place

    def _missing(self) -> tuple[str, ...]:
        calls = [n for n in self.nodes if n.op == "call_function"]
        if not calls:
            return ("the graph has no operators",)
        said = (
            ("no module paths: operators stand in their order", any(map(module_path, calls))),
            ("no source lines", any(n.meta.get("stack_trace") for n in calls)),
            ("no values: shapes, bytes and costs are unknown", any("val" in n.meta for n in calls)),
        )
        return tuple(text for text, known in said if not known)

    def view(self, opened: Collection[str] = (), fold: bool = True) -> View:
        """The boxes when the modules `opened` (their ids) are open; at most `BOX_LIMIT`."""
        drawing = _Drawing(self, set(opened), fold)
        drawing.fill(self.root, "")
        return drawing.view()

    def find(self, query: str, limit: int = 50) -> tuple[list[str], int]:
        """Ids of the operators whose name, operator, module or source line holds `query`, and how many there are."""
        if self._find is None:
            self._find = [f"{n.name} {op_name(n.target)} {(p := provenance(n)).module} {p.place} {p.text} "
                          f"{p.parameter or ''}".lower() for n in self.nodes]
        wanted = query.strip().lower()
        found = [i for i, text in enumerate(self._find) if wanted and wanted in text]
        return [self.id_of[i] for i in found[:limit]], len(found)

    def first_look(self) -> list[str]:
        """The modules to open at first: the parts, and what holds layers."""
        parts = [self.root.children[part] for part in dict.fromkeys(self.parts)]
        inner = [child for part in parts for child in part.children.values() if child.children]
        layers = [child for child in inner if all(map(str.isdigit, child.children))]
        return [block.path for block in (*parts, *layers)]

    def way_to(self, id: str) -> list[str]:
        """The modules to open, without folding, for the box `id` to be seen."""
        names = id.split("/")[:-1]
        return ["/".join(names[: k + 1]) for k in range(len(names))]


class _Drawing:
    """One view in the making: boxes, and which box stands for each node."""

    def __init__(self, tree: GraphTree, opened: set[str], fold: bool):
        self.tree, self.opened, self.fold = tree, opened, fold
        self.boxes: list[Box] = []
        self.owner: dict[int, str] = {}
        self.member: dict[int, tuple[str, int]] = {}  # of an open box that stands for several
        self.shut = 0

    def fill(self, block: Block, parent: str) -> None:
        for group in self._groups(block):
            first, every = group[0], [list(member.every()) for member in group]
            label = first.name if len(group) == 1 else f"{first.name}-{group[-1].name}"
            inside = len(first.children) + len(first.leaves)
            is_open = first.path in self.opened
            if is_open and len(self.boxes) + inside > BOX_LIMIT:
                is_open, self.shut = False, self.shut + 1
            indices = [i for member in every for i in member]
            self.boxes.append(Box(first.path, parent, label, "module", len(indices), len(group), is_open,
                                  _count(kind_of(self.tree.nodes[i]) for i in indices), self._marks(indices)))
            if not is_open:
                self.owner.update(dict.fromkeys(indices, first.path))
                continue
            self.fill(first, first.path)
            if len(group) > 1:
                self._stand_in(first.path, every)
        for i in block.leaves:
            node = self.tree.nodes[i]
            kind = "input" if node.op in ("placeholder", "get_attr") else kind_of(node)
            label = (parameter_of(node) or node.name).rpartition(".")[2] if kind == "input" else node.name
            self.boxes.append(Box(self.tree.id_of[i], parent, label, kind, 1, marks=self._marks([i])))
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
        """Equal for blocks with the same operators on the same shapes in the same modules, in whatever order."""
        if block._sign is None:
            own = Counter(map(_face, (self.tree.nodes[i] for i in block.leaves)))
            inner = tuple((child.name, self._sign(child)) for child in block.children.values())
            block._sign = hash((frozenset(own.items()), inner))
        return block._sign

    def _stand_in(self, path: str, every: list[list[int]]) -> None:
        """The first block's nodes stand for their like in the others."""
        nodes = self.tree.nodes
        like: dict[Any, list[int]] = {}
        for i in every[0]:
            like.setdefault((self._within(i, path), _face(nodes[i])), []).append(i)
        for number, member in enumerate(every):
            turn: Counter[Any] = Counter()
            base = "/".join([*path.split("/")[:-1], ""])
            for i in member:
                self.member[i] = (path, number)
                if number:
                    inner = self.tree.id_of[i].removeprefix(base).partition("/")[2].rpartition("/")[0]
                    key = (inner, _face(nodes[i]))
                    twins = like.get(key, [every[0][0]])
                    self.owner[i] = self.owner[twins[min(turn[key], len(twins) - 1)]]
                    turn[key] += 1

    def _within(self, i: int, path: str) -> str:
        return self.tree.id_of[i].removeprefix(f"{path}/").rpartition("/")[0]

    def view(self) -> View:
        found: dict[tuple[str, str, bool], list[int]] = {}
        owner, tree = self.owner, self.tree
        for i, given in enumerate(tree.inputs):
            for j in given:
                a, b = owner[j], owner[i]
                if a == b or b.startswith(f"{a}/") or a.startswith(f"{b}/"):
                    continue
                mine, other = self.member.get(j), self.member.get(i)
                if mine and other and mine[0] == other[0] and mine[1] != other[1]:
                    continue  # from one of the folded blocks to the next
                found.setdefault((a, b, tree.parts[i] != tree.parts[j]), []).append(j)
        links = tuple(Link(a, b, len(js), saved, _bytes(tree.nodes[j] for j in set(js)) if saved else 0)
                      for (a, b, saved), js in found.items())
        note = f"{self.shut} modules stay shut: {BOX_LIMIT:,} boxes are the most that is drawn" if self.shut else ""
        return View(tuple(self.boxes), links, note)


def _face(node: Node) -> tuple[str, tuple[int, ...]]:
    value = node.meta.get("val")
    name = op_name(node.target) if node.op == "call_function" else node.op
    return name, tuple(map(hint, value.shape)) if isinstance(value, torch.Tensor) else ()


def _count(items: Any) -> dict[str, int]:
    return dict(Counter(items).most_common())


def _bytes(nodes: Any) -> int:
    return sum(tensor_bytes(n.meta.get("val")) for n in nodes)


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for child in block.children.values():
        yield from _blocks(child)


def _chunk(root: Block) -> None:
    """Operators beyond `CHUNK` in one block get blocks of their own, by their order."""
    for block in list(_blocks(root)):
        if len(block.leaves) > CHUNK:
            for start in range(0, len(block.leaves), CHUNK):
                some = block.leaves[start : start + CHUNK]
                name = f"operators {start + 1} to {start + len(some)}"
                block.children[name] = Block(f"{block.path}/{name}", name, leaves=some)
            block.leaves = []
