"""A joint graph of a few alike blocks becomes that of many: the lower one of two neighbours is copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from workbench.errors import NotAlike
from workbench.graph.stamping.order import Names, Turns, longer, turns_of
from workbench.graph.stamping.pairs import STACKS, VALUES, Pairs, Ref
from workbench.torch_api import stamping
from workbench.torch_api.ops import key_of_storage

Place = tuple[Node, int | None]
"""A node of the longer graph: a node of the lower block and the number of its copy, or one outside and None."""


class Stamp:
    """`stamped` is the longer graph. Raises NotAlike, with the node, where the two blocks differ."""

    def __init__(self, graph: GraphModule, names: Names) -> None:
        self.pairs, self.names, self.last = Pairs(graph, names), names, names.extra + 1
        self.made: dict[Place, Node] = {}
        self.stores: dict[tuple[Node, int | None, int], Any] = {}
        for node in self.pairs.nodes:
            for storage in stamping.storages([node.meta.get(k) for k in VALUES]):
                owner, i = self.pairs.owners[key_of_storage(storage)]
                self.stores[(*self._place(owner), i)] = storage
        self.stacks: dict[tuple[int, int | None], dict[str, Any]] = {}
        self.stamped = self._build(graph)

    def _place(self, node: Node) -> Place:
        """The place in the longer graph of a node of the small one."""
        if node in self.pairs.upper_of:
            return node, 0
        lower = self.pairs.lower_of.get(node)
        return (node, None) if lower is None else (lower, self.last)

    def _at(self, ref: Ref, copy: int) -> Place:
        if ref.lower is not None and 0 <= copy + ref.step <= self.last:
            return ref.lower, copy + ref.step
        assert ref.outside is not None
        return ref.outside, None

    def _build(self, old: GraphModule) -> GraphModule:
        pairs, builder, extra = self.pairs, stamping.Builder(old), self.names.extra
        number = _Numbers([n.name for n in pairs.nodes], pairs.turns, extra)
        for at, turn in longer(len(pairs.nodes) - 1, pairs.turns, extra):
            node = pairs.nodes[at]
            lower, copy = place = (node, turn) if turn is not None else self._place(node)
            if copy is None:
                args, kwargs = (map_arg(x, lambda n: self.made[self._place(n)]) for x in (node.args, node.kwargs))
            else:
                args, kwargs = (self._filled(x, copy) for x in pairs.args[lower])
            self.made[place] = builder.add(node, number(at, turn), args, kwargs, self._meta(node, lower, copy))
        self._output(builder, pairs.nodes[-1])
        return builder.module

    def _filled(self, args: Any, copy: int) -> Any:
        """The arguments of a node of the lower block, for one of its copies."""
        if isinstance(args, Ref):
            return self.made[self._at(args, copy)]
        if isinstance(args, list | tuple):
            return type(args)([self._filled(a, copy) for a in args])
        if isinstance(args, dict):
            return {k: self._filled(v, copy) for k, v in args.items()}
        if isinstance(args, slice):
            return slice(*(self._filled(a, copy) for a in (args.start, args.stop, args.step)))
        return args

    def _meta(self, node: Node, lower: Node, copy: int | None) -> dict[str, Any]:
        """The metadata for a copy of `lower`. node: its source, of the upper block for the last copy, else `lower`."""
        meta, names, turn = dict(node.meta), self.names, None if node is not lower else copy
        by = names.extra if node is not lower else copy
        for key in STACKS:
            if meta.get(key):
                meta[key] = self._stack(meta[key], by)
        if meta.get("desc") is not None and node.op == "placeholder":
            meta["desc"] = stamping.copy_of(meta["desc"], names.of_copy, turn)
        if "seq_nr" in meta:
            meta["seq_nr"] = self._seq(meta["seq_nr"], node, lower, copy)
        if copy is not None:
            self._set_values(meta, node, lower, copy)
        return meta

    def _seq(self, own: int, node: Node, lower: Node, copy: int | None) -> int:
        if copy is not None and node is lower:
            return self.pairs.numbers.copy(own, self.pairs.upper_of[lower].meta["seq_nr"], copy)
        return self.pairs.numbers.outside(own, copy is None and self.pairs.side.get(node, -1) < 0)

    def _stack(self, stack: dict[str, Any], by: int | None) -> dict[str, Any]:
        """A module stack with its block number raised by `by`; None for a stack outside the copies."""
        known = self.stacks.get((id(stack), by))
        if known is None:
            known = self.stacks[id(stack), by] = {}
            for key, (path, kind) in stack.items():
                new = self.names.outside(path) if by is None else self.names.moved(path, by)
                known[self.names.modules.get(new, key)] = new, kind
        return known

    def _set_values(self, meta: dict[str, Any], node: Node, lower: Node, copy: int) -> None:
        """Give a copy storages of its own, shared among the same nodes as in the small graph."""
        wanted = [self._storage(ref, i, copy) for ref, i in self.pairs.values[lower]]
        for key in VALUES:
            have = stamping.storages(meta.get(key))
            given, wanted = wanted[: len(have)], wanted[len(have) :]
            unchanged = copy in (0, self.last) and given == have
            if have and not unchanged:
                meta[key] = stamping.with_storages(meta[key], given)

    def _storage(self, ref: Ref, i: int, copy: int) -> Any:
        place = self._at(ref, copy)
        if (*place, i) not in self.stores:
            self.stores[(*place, i)] = stamping.new_storage(self.stores[(place[0], 0, i)])
        return self.stores[(*place, i)]

    def _output(self, builder: stamping.Builder, node: Node) -> None:
        """Results, gradients and their descriptors, in the order of a capture."""
        pairs, results, descs = self.pairs, list(node.args[0]), node.meta["desc"]  # type: ignore[arg-type]
        keys = [stamping.key_of(desc) for desc in descs]
        # one gradient for each input; a buffer's is None and has no descriptor
        given = [stamping.key_of(n.meta["desc"]) for n in pairs.nodes if n.op == "placeholder"]
        primals = [key for key in given if not key[0].startswith("Tangent")]
        keys[len(keys) - len(primals) :] = [(f"gradient of {kind}", name) for kind, name in primals]
        turns = turns_of([(kind, self.names.block(name)) for kind, name in keys], self.names.lower)
        lower_at = {turn.upper + i: turn.lower + i for turn in turns for i in range(turn.length)}
        upper_at = {lower: upper for upper, lower in lower_at.items()}
        order = longer(len(results), turns, self.names.extra)
        made: list[Any] = []
        for at, turn in order:
            lower, copy = (at, turn) if turn is not None else (lower_at.get(at), self.last)
            result = results[at]
            if lower is not None:
                both = pairs.same(results[lower], results[upper_at[lower]], node, node)
                result = self._filled(both, self.last if copy is None else copy)
            elif isinstance(result, Node):
                if result in pairs.upper_of or result in pairs.lower_of:
                    raise NotAlike(f"the model returns {result.name}, from the middle of the alike layers")
                result = self.made[result, None]
            made.append(result)
        meta = dict(node.meta)
        meta["desc"] = [stamping.copy_of(descs[at], self.names.of_copy, turn) for at, turn in order]
        if "seq_nr" in meta:
            meta["seq_nr"] = self.pairs.numbers.outside(meta["seq_nr"], True)
        inputs = [(at, turn) for at, turn in longer(len(pairs.nodes) - 1, pairs.turns, self.names.extra)
                  if pairs.nodes[at].op == "placeholder"]
        builder.finish(node, made, meta, inputs, order)


class _Numbers:
    """Node names as in a capture of the whole module: each block uses equally many numbers of each name."""

    def __init__(self, names: Sequence[str], turns: Sequence[Turns], extra: int) -> None:
        self.names, self.extra = [_number(name) for name in names], extra
        self.turns = sorted(turns, key=lambda t: min(t.lower, t.upper))
        self.starts = [min(t.lower, t.upper) for t in self.turns]
        self.steps, self.shifts = [], [dict[str, int]()]
        for turn, start in zip(self.turns, self.starts, strict=True):
            pairs = zip(self.names[start : start + turn.length],
                        self.names[start + turn.length : start + 2 * turn.length], strict=True)
            steps = {base: second - first for (base, first), (other, second) in pairs if base == other}
            before = self.shifts[-1]
            self.steps.append(steps)
            self.shifts.append(before | {base: before.get(base, 0) + extra * step for base, step in steps.items()})

    def __call__(self, at: int, copy: int | None) -> str:
        """The name for a copy of the node at this place of the small graph."""
        base, number = self.names[at]
        region = bisect_right(self.starts, at) - 1
        turn = self.turns[region] if region >= 0 else None
        if turn is None or at >= self.starts[region] + 2 * turn.length:
            number += self.shifts[region + 1].get(base, 0)
        else:
            upward = turn.lower < turn.upper
            turns = (copy if upward else self.extra - copy) if copy is not None else self.extra if upward else 0
            number += self.shifts[region].get(base, 0) + turns * self.steps[region].get(base, 0)
        return f"{base}_{number}" if number else base


def _number(name: str) -> tuple[str, int]:
    base, _, end = name.rpartition("_")
    return (base, int(end)) if base and end.isdecimal() else (name, 0)
