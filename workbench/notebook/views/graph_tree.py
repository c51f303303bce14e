"""A graph as a tree of modules. A closed module is one box, and so are identical blocks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.partition import saved_nodes
from workbench.graph.read.nodes import kind_of, module_path, provenance
from workbench.torch_api.aot import is_tangent, parameter_of
from workbench.torch_api.ops import op_name

CHUNK = 200
"""The most operators in one box that have no module inside it."""


@dataclass
class Block:
    """A module, or a part of the graph, and what it holds: modules, and operators as places in `GraphTree.nodes`."""

    path: str
    name: str
    children: dict[str, Block] = field(default_factory=dict)
    leaves: list[int] = field(default_factory=list)
    _sign: Any = None

    def every(self) -> list[int]:
        leaves = list(self.leaves)
        for child in self.children.values():
            leaves += child.every()
        return leaves


class GraphTree:
    """Graphs (by part: `forward` and `backward`, or one of any kind) as one tree of modules.

    A joint graph is divided by its nodes' tags. A backward's saved inputs are drawn as links from the forward's nodes.
    `missing` names what the graph's metadata lacks. `marks`: what a pass did, by node name. nodes, parts (forward or
    backward), inputs (places in `nodes`), kinds and id_of (the box's id) have one entry for each operator.
    """

    def __init__(self, graphs: Mapping[str, GraphModule], marks: Mapping[str, str] | None = None):
        self.marks = marks or {}
        self.nodes: list[Node] = []
        self.parts: list[str] = []
        self.inputs: list[list[int]] = []
        self.root = Block("", "")
        self._find: list[str] | None = None
        place: dict[Node, int] = {}
        if {"forward", "backward"} <= graphs.keys():
            place = self._add(graphs["forward"], "forward", place)
            taken = [
                n
                for n in graphs["backward"].graph.find_nodes(op="placeholder")
                if not is_tangent(n)
            ]
            kept = saved_nodes(graphs["forward"], graphs["backward"])
            place |= {
                late: place[early]
                for late, early in zip(taken, kept, strict=True)
                if early in place
            }
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
        self.kinds = [
            "input" if n.op in ("placeholder", "get_attr") else kind_of(n) for n in self.nodes
        ]

    def _add(self, gm: GraphModule, part: str, place: dict[Node, int]) -> dict[Node, int]:
        joint = part == "joint"
        blocks: dict[tuple[str, str | None], Block] = {}
        for node in gm.graph.nodes:
            if (
                node.op == "output"
                or node in place
                or (node.op == "placeholder" and not node.users)
            ):
                continue  # such a placeholder is a mesh
            later = joint and node.meta.get("partitioner_tag") == "is_backward"
            if joint and node.op == "placeholder":
                later = is_tangent(node)
            side = ("backward" if later else "forward") if joint else part
            path = parameter_of(node) if node.op == "placeholder" else module_path(node)
            if node.op == "placeholder":  # drawn in the module whose parameter it is
                path = path.rpartition(".")[0] if path else "inputs"
            place[node] = i = len(self.nodes)
            self.nodes.append(node)
            self.parts.append(side)
            self.inputs.append([place[n] for n in node.all_input_nodes if n in place])
            if (block := blocks.get((side, path))) is None:
                block = blocks[side, path] = self._block(side, *(path.split(".") if path else ()))
            block.leaves.append(i)
        return place

    def _block(self, *names: str) -> Block:
        block = self.root
        for name in names:
            if (child := block.children.get(name)) is None:
                child = block.children[name] = Block(
                    f"{block.path}/{name}" if block.path else name, name
                )
            block = child
        return block

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

    def find(self, query: str, limit: int = 50) -> tuple[list[str], int]:
        """Ids of the operators whose name, operator, module or source line holds `query`, and how many there are."""
        if self._find is None:
            self._find = [
                f"{n.name} {op_name(n.target)} {(p := provenance(n)).module} {p.place} {p.text} "
                f"{p.parameter or ''}".lower()
                for n in self.nodes
            ]
        wanted = query.strip().lower()
        matches = [i for i, text in enumerate(self._find) if wanted and wanted in text]
        return [self.id_of[i] for i in matches[:limit]], len(matches)

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
