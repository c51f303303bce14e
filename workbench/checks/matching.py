"""Which nodes of two runs on the same inputs are the same, by value and by name, and where the second goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.fx import Node

from workbench.checks.numerics import compare_one
from workbench.checks.values import Key, Trace, Value
from workbench.graph.read.nodes import provenance
from workbench.torch_api import tree as pytree

Bound = Callable[[torch.Tensor, torch.Tensor], float | None]
"""The norm-relative difference that two tensors may have; None for equal bits."""


@dataclass(frozen=True)
class Gap:
    """How two values differ: as text ("" for within the contract), norm-relative, and at most in one element."""

    problem: str
    relative: float = 0.0
    largest: float = 0.0


def gap(a: Value, b: Value, bound: Bound) -> Gap:
    """The worst difference of the items that both values have."""
    worst = Gap("")
    for item in sorted(a.tensors.keys() & b.tensors.keys()):
        was, now = a.tensors[item], b.tensors[item]
        problem, relative = compare_one(was, now, bound(was, now))
        if problem and (not worst.problem or relative > worst.relative):
            where = f"item {item}: " if len(a.tensors) > 1 else ""
            worst = Gap(where + problem, relative, _largest(was, now))
    return worst


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return inf
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    apart = (b.to(kind) - a.to(kind)).abs()
    return float(apart.nan_to_num(nan=inf, posinf=inf).max()) if apart.numel() else 0.0


class _Pool:
    """The values of one run, found again by what they are: shape and dtype, then norm, then all elements."""

    def __init__(self, run: Trace, bound: Bound):
        self.bound = bound
        self.by_shape: dict[Any, list[tuple[float, Value]]] = {}
        for value in run.values.values():
            if value.tensors:
                self.by_shape.setdefault(_shapes(value), []).append((_norm(value), value))

    def same(self, value: Value) -> list[Value]:
        """The run's values that equal this one within the bound."""
        norm = _norm(value)
        slack = max(self.bound(t, t) or 0.0 for t in value.tensors.values()) * 2 * norm
        return [other for size, other in self.by_shape.get(_shapes(value), ())
                if abs(size - norm) <= slack and not gap(other, value, self.bound).problem]


def _shapes(value: Value) -> tuple[Any, ...]:
    return tuple((i, tuple(t.shape), t.dtype) for i, t in sorted(value.tensors.items()))


def _norm(value: Value) -> float:
    """Of the finite elements of all items: a first, quick look at what could be equal."""
    def one(tensor: torch.Tensor) -> float:
        plain = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        return float(plain[plain.isfinite()].norm())

    return sum(map(one, value.tensors.values()))


class Matching:
    """Nodes of `after` with the nodes of `before` whose values they have: `same`. The rest are new, or wrong.

    The counterpart of such a node is the node of its name, where both come from the same line of the same module; else
    the one that stood in its place among its reader's arguments, or among the outputs; else one that read the same.
    """

    def __init__(self, before: Trace, after: Trace, bound: Bound):
        self.before, self.after, self.bound = before, after, bound
        self.same: dict[Key, Key] = {}
        self._taken: set[Key] = set()
        self._match()
        self._follow_the_rest()
        self._renamed: dict[Any, list[Value]] = {}
        for key, value in before.values.items():
            if key not in self._taken and self.namesake(key) is None:
                self._renamed.setdefault(_signature(value), []).append(value)
        self.readers: dict[Key, list[Value]] = {}
        for value in after.values.values():
            for key in value.reads:
                self.readers.setdefault(key, []).append(value)

    def _match(self) -> None:
        pool = _Pool(self.before, self.bound)
        rest = []
        for key, value in self.after.values.items():
            twin = self.before.values.get(key)
            if value.tensors and twin is not None and twin.tensors and not gap(twin, value, self.bound).problem:
                self._found(key, key)
            elif value.tensors:
                rest.append((key, value, pool.same(value)))
        for key, value, equal in rest:  # under another name
            own = self.namesake(key)
            free = [v for v in equal if v.key not in self._taken
                    and (own is None or _origin(v.node) == _origin(value.node))]
            if free:
                self._found(key, free[0].key)
        for key, _, equal in rest:  # a second copy; but a node whose own value is lost has a wrong one
            own = self.namesake(key)
            if equal and key not in self.same and (own is None or own in self._taken):
                self.same[key] = equal[0].key

    def _found(self, key: Key, twin: Key) -> None:
        self.same[key] = twin
        self._taken.add(twin)

    def _follow_the_rest(self) -> None:
        """What has no value of its own is as right as what it reads."""
        self.right = set(self.same)
        for key, value in self.after.values.items():
            if not value.tensors and all(read in self.right for read in value.reads):
                self.right.add(key)

    def namesake(self, key: Key) -> Key | None:
        """The node of the same name before, if both come from the same place."""
        a, b = self.before.values.get(key), self.after.values.get(key)
        return key if a is not None and b is not None and _origin(a.node) == _origin(b.node) else None

    def _alike(self, value: Value) -> Key | None:
        """Where a retrace numbered the names anew: the one operator of the same line that reads the same."""
        fits = [v for v in self._renamed.get(_signature(value), ()) if len(v.reads) == len(value.reads)
                and all(self.same.get(now, was) == was for now, was in zip(value.reads, v.reads, strict=True))]
        return fits[0].key if len(fits) == 1 else None

    def _by_place(self, key: Key) -> Key | None:
        node = self.after.values[key].node
        for reader in self.readers.get(key, ()):
            twin = self.namesake(reader.key) or self._alike(reader)
            if twin is None or reader.node.op == "output":
                continue
            for now, was in zip(arguments(reader.node), arguments(self.before.values[twin].node), strict=False):
                if now is node and isinstance(was, Node) and (twin[0], was.name) in self.before.values:
                    return twin[0], was.name
        for own, other in zip(self.after.producers, self.before.producers, strict=False):
            if own == key:
                return other
        return None

    def _by_reads(self, key: Key, claimed: set[Key]) -> Key | None:
        """Where names say nothing: a node whose value is lost, of the same shape, which read the same."""
        value = self.after.values[key]
        reads = [self.same.get(read) for read in value.reads]
        lost = (v for k, v in self.before.values.items() if k not in self._taken | claimed and v.tensors)
        alike = [v for v in lost if reads and list(v.reads) == reads and _shapes(v) == _shapes(value)]
        return next((v.key for v in alike if v.node.target == value.node.target), alike[0].key if alike else None)

    def wrong_outputs(self) -> list[int]:
        """The places among the outputs where the two runs differ."""
        pairs = enumerate(zip(self.before.outputs, self.after.outputs, strict=False))
        return [i for i, (a, b) in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
                and compare_one(a, b, self.bound(a, b))[0]]

    def suspects(self) -> list[Key]:
        """The nodes that are not right and from which a wrong output comes through others like them, in node order."""
        todo = [key for i in self.wrong_outputs() if (key := self.after.producers[i]) is not None]
        found: set[Key] = set()
        while todo:
            key = todo.pop()
            if key not in found and key not in self.right:
                found.add(key)
                todo += self.after.values[key].reads
        return sorted(found, key=self._order)

    def _order(self, key: Key) -> tuple[int, int]:
        part, _, _, order = self.after.values[key].place
        return part, order

    def first(self, suspects: list[Key]) -> tuple[Key, Key] | None:
        """The first suspect that has a counterpart, and that: what it reads is right, or the pass's own."""
        known = {k: self.namesake(k) or self._by_place(k) for k in suspects if self.after.values[k].tensors}
        claimed = {twin for twin in known.values() if twin is not None}
        for key, twin in known.items():
            twin = twin or self._alike(self.after.values[key]) or self._by_reads(key, claimed)
            if twin is not None:
                return key, twin
        return None

    def new_before(self, key: Key, suspects: list[Key]) -> list[Key]:
        """The suspects that `key` comes from: nodes of the pass that nothing before stands for, in node order."""
        allowed, todo, found = set(suspects), list(self.after.values[key].reads), set()
        while todo:
            read = todo.pop()
            if read in allowed and read not in found:
                found.add(read)
                todo += self.after.values[read].reads
        return [k for k in suspects if k in found]


def arguments(node: Node) -> list[Any]:
    """All arguments of a node, flat: nodes and constants."""
    return list(pytree.tree_leaves((node.args, dict(node.kwargs))))


def _signature(value: Value) -> tuple[Any, ...]:
    return value.node.target, _origin(value.node), _shapes(value)


def _origin(node: Node) -> tuple[str, str, bool]:
    found = provenance(node)
    return found.module, found.place, found.backward
