"""Two neighbouring blocks of a joint graph, matched node by node, with the values that each reads of the other.

A copy between them reads the same: from outside what both read there, from the block before it what the upper block
reads of the lower, and from the block after it what the lower block reads of the upper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from workbench.errors import NotAlike
from workbench.graph.stamping.order import Names, turns_of
from workbench.torch_api import stamping
from workbench.torch_api.ops import key_of_storage

STACKS = ("nn_module_stack", "fwd_nn_module_stack")
VALUES = ("val", "eager_input_vals")
NAMED_BY_DYNAMO = {"from_node", "source_fn_stack", "fwd_source_fn_stack"}
"""Names of nodes in Dynamo's graph, which differ by block. Copies keep those of the lower block."""


@dataclass(frozen=True)
class Ref:
    """An argument as any copy reads it: the node `lower` of the copy `step` further on.

    Beyond the first and last copy, or without `lower`, it is `outside`, a node of the surrounding graph.
    """

    lower: Node | None
    step: int
    outside: Node | None


class Pairs:
    """The matched nodes of two neighbouring blocks. Raises NotAlike where they differ."""

    def __init__(self, graph: GraphModule, names: Names) -> None:
        self.names, self.nodes = names, list(graph.graph.nodes)
        # not by the tags alone: nodes from a custom backward of the model have none
        self.half = next((i for i, n in enumerate(self.nodes) if n.op == "call_function"
                          and "backward" in str(n.meta.get("partitioner_tag"))), len(self.nodes))
        keys = [self._key(i, node) for i, node in enumerate(self.nodes)]
        self.turns = turns_of(keys, names.lower)
        self.upper_of: dict[Node, Node] = {}
        self.side: dict[Node, int] = {}
        for turn in self.turns:
            section = keys[turn.lower][0]
            for i in range(turn.length):
                self.upper_of[self.nodes[turn.lower + i]] = self.nodes[turn.upper + i]
            for i, node in enumerate(self.nodes):
                if keys[i][0] == section:
                    self.side[node] = -1 if (i < turn.upper) == (turn.lower < turn.upper) else 1
        self.lower_of = {upper: lower for lower, upper in self.upper_of.items()}
        self.owners = self._owners()
        self.numbers = Numbers(self)
        for lower, upper in self.upper_of.items():
            self._compare(lower, upper)
        self.args = {a: tuple(self.same(getattr(a, k), getattr(b, k), a, b) for k in ("args", "kwargs"))
                     for a, b in self.upper_of.items()}
        self.values = {a: self._storages(a, b) for a, b in self.upper_of.items()}
        self._check_outside()

    def _key(self, place: int, node: Node) -> tuple[str, int | None]:
        if node.op == "placeholder":
            kind, name = stamping.key_of(node.meta.get("desc"))
            return kind, self.names.block(name)
        part = "backward" if place >= self.half else "forward"
        stack: dict[str, Any] = next((node.meta[k] for k in STACKS if node.meta.get(k)), {})
        found = {self.names.block(path) for path, _ in stack.values()} - {None}
        return ("output", None) if node.op == "output" else (part, next(iter(found), None))

    def _owners(self) -> dict[int, tuple[Node, int]]:
        """By key, the first node that has a storage, and the index of the storage among those of that node."""
        found: dict[int, tuple[Node, int]] = {}
        for node in self.nodes:
            new = 0
            for storage in stamping.storages([node.meta.get(k) for k in VALUES]):
                if (key := key_of_storage(storage)) not in found:
                    found[key] = node, new
                    new += 1
        return found

    def differ(self, lower: Node, upper: Node, what: str) -> NotAlike:
        one, two = f"layers.{self.names.lower}", f"layers.{self.names.lower + 1}"
        return NotAlike(f"{one} and {two} differ at {lower.name} and {upper.name}: {what}")

    def ref(self, a: Node, b: Node) -> Ref | None:
        """The argument that is `a` in the lower block and `b` in the upper one; None where the two do not match."""
        if self.upper_of.get(a) is b:
            return Ref(a, 0, None)
        inside = {a, b} & (self.upper_of.keys() | self.lower_of.keys())
        if a is b and not inside:
            return Ref(None, 0, a)
        if b in self.upper_of and a not in inside and self.side.get(a, -1) < 0:
            return Ref(b, -1, a)
        if a in self.lower_of and b not in inside and self.side.get(b, 1) > 0:
            return Ref(self.lower_of[a], 1, b)
        return None

    def same(self, a: Any, b: Any, lower: Node, upper: Node) -> Any:
        """An argument of both nodes, with a `Ref` in place of each node."""
        if isinstance(a, Node) and isinstance(b, Node):
            found = self.ref(a, b)
            if found is None:
                raise self.differ(lower, upper, f"one reads {a.name}, the other {b.name}")
            return found
        if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            items = [self.same(x, y, lower, upper) for x, y in zip(a, b, strict=True)]
            return items if isinstance(a, list) else tuple(items)
        if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
            return {k: self.same(a[k], b[k], lower, upper) for k in a}
        if isinstance(a, slice) and isinstance(b, slice):
            return slice(*(self.same(getattr(a, k), getattr(b, k), lower, upper) for k in ("start", "stop", "step")))
        if type(a) is not type(b) or not (a is b or a == b):
            raise self.differ(lower, upper, f"one is given {a!r}, the other {b!r}")
        return a

    def _storages(self, lower: Node, upper: Node) -> list[tuple[Ref, int]]:
        """The owner of the storage of each tensor in the node's values."""
        found = []
        mine, theirs = ([self.owners[key_of_storage(s)] for k in VALUES for s in
                         stamping.storages(n.meta.get(k))] for n in (lower, upper))
        for (a, i), (b, j) in zip(mine, theirs, strict=False):
            ref = self.ref(a, b)
            if ref is None or i != j:
                raise self.differ(lower, upper, f"one shares memory with {a.name}, the other with {b.name}")
            found.append((ref, i))
        return found

    def _compare(self, lower: Node, upper: Node) -> None:
        if "get_attr" in (lower.op, upper.op):
            raise self.differ(lower, upper, "a constant, or a graph that an operator calls, is the block's own")
        if lower.op != upper.op or (lower.op != "placeholder" and lower.target != upper.target):
            raise self.differ(lower, upper, f"{lower.target} and {upper.target}")
        if lower.meta.keys() != upper.meta.keys():
            raise self.differ(lower, upper, f"metadata {sorted(lower.meta.keys() ^ upper.meta.keys())}")
        for key, one in lower.meta.items():
            two = upper.meta[key]
            if key in STACKS:
                one, two = ([(self.names.moved(path, by), kind) for path, kind in (stack or {}).values()]
                            for stack, by in ((one, 1), (two, 0)))
            elif key == "desc":
                one = stamping.renamed(one, lambda name: self.names.moved(name, 1))
            elif key in VALUES:
                one, two = stamping.face(one), stamping.face(two)
            elif key == "original_aten":  # copies of the operators
                one, two = str(one), str(two)
            elif key == "seq_nr":
                one, two = self.numbers.by_pair(one, two), True
            if key not in NAMED_BY_DYNAMO and one != two:
                raise self.differ(lower, upper, f"{key} {one} and {two}")

    def _check_outside(self) -> None:
        """Nodes before the two blocks read nothing of the upper one, and nodes after them nothing of the lower one."""
        for node in self.nodes:
            if node in self.upper_of or node in self.lower_of or node.op == "output":
                continue
            wrong = self.lower_of if self.side.get(node, -1) < 0 else self.upper_of
            read = next((n for n in node.all_input_nodes if n in wrong), None)
            if read is not None:
                raise NotAlike(f"{node.name}, outside the alike layers, reads {read.name} in the middle of them")


class Numbers:
    """Autograd's sequence numbers (`seq_nr`). A backward node has the number of its forward node.

    A sum of gradients has no forward node and gets the current count, which is above all numbers of the forward, and
    grows during the backward. forward, backward: the step from one block to the next.
    """

    def __init__(self, pairs: Pairs) -> None:
        calls = {a: b for a, b in pairs.upper_of.items() if a.op == b.op == "call_function"}
        forward = [n.meta["seq_nr"] for n in pairs.nodes[: pairs.half] if n.op == "call_function"]
        self.last = max(forward, default=0)
        both = [(a.meta["seq_nr"], b.meta["seq_nr"]) for a, b in calls.items()]
        self.forward = _commonest(b - a for a, b in both if b <= self.last)
        self.backward = _commonest(a - b for a, b in both if b > self.last)
        self.upper = min((b for _, b in both if b <= self.last), default=0)
        self.extra = pairs.names.extra

    def by_pair(self, lower: int, upper: int) -> bool:
        """Whether the two numbers of a node are as far apart as those of the other nodes."""
        if lower > self.last:
            return lower - upper == self.backward
        return upper - lower in (0, self.forward)

    def outside(self, own: int, before: bool) -> int:
        """The number in the longer graph of a node outside the blocks. before: on the lower block's side."""
        if own > self.last:
            return own + self.extra * (self.forward + (self.backward if before else 0))
        return own + self.extra * self.forward if own >= self.upper else own

    def copy(self, lower: int, upper: int, copy: int) -> int:
        """The number of a node in a copy of the lower block."""
        if lower > self.last:
            return lower + self.extra * self.forward + (self.extra - copy) * self.backward
        return lower + copy * self.forward if upper != lower else self.outside(lower, True)


def _commonest(steps: Iterable[int]) -> int:
    return next((step for step, _ in Counter(step for step in steps if step).most_common(1)), 0)
