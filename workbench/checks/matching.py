"""Matches the nodes of two runs on the same inputs by value and by name, and finds the second run's first error."""

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
"""The norm-relative difference that two tensors may have; None where their bits must be equal."""


@dataclass(frozen=True)
class Gap:
    """How two values differ: in words ("" within the contract), norm-relative, and at most in one element."""

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
    """The norms of all items' finite elements, summed: a quick filter before elements are compared."""
    def one(tensor: torch.Tensor) -> float:
        plain = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        return float(plain[plain.isfinite()].norm())

    return sum(map(one, value.tensors.values()))


class Matching:
    """`same` maps nodes of `after` to the nodes of `before` that have the same value. Other nodes are new or wrong.

    The counterpart of such a node is the node of the same name, where both come from the same line of the same module;
    else the node that had its place among a reader's arguments or among the outputs; else one with the same inputs.
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
        for key, _, equal in rest:  # a second copy, unless the value of its namesake is lost
            own = self.namesake(key)
            if equal and key not in self.same and (own is None or own in self._taken):
                self.same[key] = equal[0].key

    def _found(self, key: Key, twin: Key) -> None:
        self.same[key] = twin
        self._taken.add(twin)

    def _follow_the_rest(self) -> None:
        """A node without a value is right where all its inputs are."""
        self.right = set(self.same)
        for key, value in self.after.values.items():
            if not value.tensors and all(read in self.right for read in value.reads):
                self.right.add(key)

    def namesake(self, key: Key) -> Key | None:
        """The node of the same name before, if both come from the same place."""
        a, b = self.before.values.get(key), self.after.values.get(key)
        return key if a is not None and b is not None and _origin(a.node) == _origin(b.node) else None

    def _alike(self, value: Value) -> Key | None:
        """Where a retrace changed the names: the only operator of the same line with the same inputs."""
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
        """Where names do not help: a node of the same shape and inputs whose value is lost."""
        value = self.after.values[key]
        reads = [self.same.get(read) for read in value.reads]
        lost = (v for k, v in self.before.values.items() if k not in self._taken | claimed and v.tensors)
        alike = [v for v in lost if reads and list(v.reads) == reads and _shapes(v) == _shapes(value)]
        return next((v.key for v in alike if v.node.target == value.node.target), alike[0].key if alike else None)

    def wrong_outputs(self) -> list[int]:
        """Indices of the outputs in which the two runs differ."""
        pairs = enumerate(zip(self.before.outputs, self.after.outputs, strict=False))
        return [i for i, (a, b) in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
                and compare_one(a, b, self.bound(a, b))[0]]

    def suspects(self) -> list[Key]:
        """The wrong nodes that reach a wrong output through wrong nodes only, in node order."""
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
        """The first suspect that has a counterpart, and the counterpart; its inputs are right, or added by the pass."""
        known = {k: self.namesake(k) or self._by_place(k) for k in suspects if self.after.values[k].tensors}
        claimed = {twin for twin in known.values() if twin is not None}
        for key, twin in known.items():
            twin = twin or self._alike(self.after.values[key]) or self._by_reads(key, claimed)
            if twin is not None:
                return key, twin
        return None

    def new_before(self, key: Key, suspects: list[Key]) -> list[Key]:
        """The suspects from which `key` is computed: nodes that the pass added, in node order."""
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
