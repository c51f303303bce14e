"""The first wrong node of a pass: both graphs run on the same inputs, and their nodes matched by value and by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from workbench.checks.numerics import allowance, compare_one
from workbench.graph.callables import graph_of
from workbench.graph.partition import saved_nodes
from workbench.graph.read.memory import Flow
from workbench.graph.read.nodes import described, output_values, provenance, reachable
from workbench.graph.read.program import node_record
from workbench.pipeline.proofs.numerics_proof import run_graphs, written_inputs
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import first_line
from workbench.torch_api.ops import blocks, collective_kind, op_name
from workbench.torch_api.tree import tree_leaves, tree_map

Key = tuple[str, str]
"""(graph, node name): the graph is joint, forward or backward."""
Bound = Callable[[torch.Tensor, torch.Tensor], float | None]
"""The norm-relative difference that two tensors may have; None where their bits must be equal."""


@dataclass
class Value:
    """The result of one node. reads: the nodes from which it is computed. origin: module, line and direction.
    tensors: host copies by item, 0 for a plain tensor; empty for the step's inputs and for sizes. allowed: by item, how
    far the value may be off by rounding alone, norm-relative, as `allow` notes it.
    """

    node: Node
    key: Key
    reads: tuple[Key, ...]
    origin: tuple[str, str, bool]
    tensors: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    allowed: dict[int, float] = field(default_factory=dict, repr=False)

    @property
    def recorded(self) -> bool:
        """Whether its source line is known."""
        return bool(self.origin[1])


@dataclass
class Trace:
    """One run. outputs: the results and the gradients, without the saved tensors; producers: the node of each, None for
    a constant. raised: the node at which the run ended, and why. allowed: as that of a `Value`, by output.
    """

    values: dict[Key, Value] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    producers: list[Key | None] = field(default_factory=list)
    raised: tuple[Key, str] | None = None
    allowed: list[float] = field(default_factory=list)


class _Recorder(Interpreter):
    """Runs a graph and records each node's result. Collectives are waited for at once; memory begins as zeros.

    saved: the backward's inputs that the forward gave, and by which node.
    """

    def __init__(self, graph: GraphModule, part: str, run: Trace, saved: dict[Node, Key]):
        super().__init__(graph)
        self.part, self.trace, self.saved = part, run, saved
        self.flow = Flow(graph)

    def __call__(self, *args: Any) -> list[Any]:
        return list(self.run(*tree_leaves(args), enable_io_processing=False))  # flat arguments, one a placeholder

    def run_node(self, n: Node) -> Any:
        key, where = (self.part, n.name), provenance(n)
        value = Value(n, key, self._reads(n), (where.module, where.place, where.backward))
        self.trace.values[key] = value
        try:
            result = super().run_node(n)
        except Exception as error:
            self.trace.raised = key, f"raises {type(error).__name__}: {first_line(error)}"
            raise
        if n.op == "call_function" and collective_kind(n.target) is not None and not blocks(n.target):
            result = tree_map(torch.ops._c10d_functional.wait_tensor, result)
        if op_name(n.target).startswith(("aten.empty", "aten.new_empty")):
            result.zero_()
        if n.op in ("call_function", "get_attr") or n in self.saved:
            value.tensors = _host(n, result)
        return result

    def _reads(self, n: Node) -> tuple[Key, ...]:
        """The nodes that it reads, and those that wrote into the memory that it reads."""
        if n in self.saved:
            return (self.saved[n],)
        reads = [(self.part, read.name) for read in n.all_input_nodes]
        for read in n.all_input_nodes:
            writers = self.flow.writers.get(self.flow.owner[read], ())
            reads += [(self.part, writer.name) for writer in writers if writer is not n]
        return tuple(dict.fromkeys(key for key in reads if key in self.trace.values))


def _host(n: Node, result: Any) -> dict[int, torch.Tensor]:
    """Copies of the tensor, or of the items that the graph reads."""
    items = result if isinstance(result, list | tuple) else [result]
    read = {user.args[1] for user in n.users if op_name(user.target) == "operator.getitem"} or {0}
    return {i: item.detach().to("cpu", copy=True).contiguous() for i, item in enumerate(items)
            if i in read and isinstance(item, torch.Tensor)}


def trace(record: PassRecord, bodies: Sequence[Any], inputs: list[Any], tangents: list[Any]) -> Trace | None:
    """Run `record.before` or `.after`, and keep every value on the host; None without graphs. Every rank calls it."""
    graphs = [graph_of(body) for body in bodies]
    if not all(isinstance(graph, GraphModule) for graph in graphs):
        return None
    run = Trace()
    outputs = [output_values(graph) for graph in graphs]
    saved: dict[Node, Key] = {}
    if len(graphs) == 2:
        sources = saved_nodes(*graphs)
        readers = graphs[1].graph.find_nodes(op="placeholder")
        saved = {reader: ("forward", source.name) for reader, source in zip(readers, sources, strict=False)
                 if isinstance(source, Node)}
        outputs[0] = outputs[0][:len(outputs[0]) - len(sources)]
    for part, values in zip(record.parts, outputs, strict=True):
        run.producers += [(part, value.name) if isinstance(value, Node) else None for value in values]
    recorders = tuple(_Recorder(graph, part, run, saved) for graph, part in zip(graphs, record.parts, strict=True))
    try:
        with torch.no_grad():
            results = run_graphs(record, recorders, inputs, tangents, written_inputs(record, inputs, tangents))
        run.outputs = results[: len(run.producers)]
    except Exception:
        if run.raised is None:
            raise
    return run


def allow(before: Trace, moved: Trace) -> None:
    """Note in `before` what `allowance` says of each value and output, by a run on inputs moved by one eps."""
    for key, value in before.values.items():
        far = moved.values[key].tensors if key in moved.values else {}
        value.allowed = {
            item: allowance(value.tensors[item], far[item]) for item in value.tensors if item in far
        }
    outputs = zip(before.outputs, moved.outputs, strict=False)
    before.allowed = [allowance(value, far) for value, far in outputs]


def _problem(was: Any, now: Any, bound: Bound, allowed: float) -> str:
    limit = bound(was, now)
    return compare_one(was, now, limit if limit is None else max(limit, allowed))[0]


def difference(a: Value, b: Value, bound: Bound) -> str:
    """How the first item that breaks the contract differs; "" where the values are equal within it."""
    for item in sorted(a.tensors.keys() & b.tensors.keys()):
        allowed = a.allowed.get(item, 0.0)
        if problem := _problem(a.tensors[item], b.tensors[item], bound, allowed):
            return f"item {item}: {problem}" if len(a.tensors) > 1 else problem
    return ""


class Matching:
    """`same` maps nodes of `after` to the nodes of `before` that have the same value. Other nodes are new or wrong.

    The counterpart of such a node comes from the same line of the same module. It is the node with the same operator
    and inputs; else that of the same name; else that which had its place among a reader's arguments or the outputs;
    else one with the same inputs. Where no line is known, the operators must agree. Other nodes have no counterpart.
    """

    def __init__(self, before: Trace, after: Trace, bound: Bound):
        self.before, self.after, self.bound = before, after, bound
        self.alike: dict[Any, list[Value]] = {}
        for value in before.values.values():
            self.alike.setdefault(_shapes(value), []).append(value)
        equal = [key for key, value in after.values.items() if key in before.values and value.tensors
                 and _shapes(before.values[key]) == _shapes(value) and not difference(before.values[key], value, bound)]
        self.same = dict(zip(equal, equal, strict=True))
        for key in [key for key, value in after.values.items() if value.tensors and key not in self.same]:
            twin = self._elsewhere(after.values[key], set(equal))
            if twin is not None:
                self.same[key] = twin
        self.right = set(self.same)
        for key, value in after.values.items():  # a node without a value is right where all its inputs are
            if not value.tensors and self.right.issuperset(value.reads):
                self.right.add(key)

    def _related(self, value: Value, other: Value) -> bool:
        alike = value.recorded or value.node.target == other.node.target
        return alike and value.origin == other.origin

    def _elsewhere(self, value: Value, taken: Collection[Key]) -> Key | None:
        """A node before with this value under another name; where its own name is left, a lost one of the same line."""
        for other in self.alike.get(_shapes(value), ()):
            lost = other.key not in taken and other.origin == value.origin
            if (lost or self.namesake(value.key) is None) and not difference(other, value, self.bound):
                return other.key
        return None

    def namesake(self, key: Key) -> Key | None:
        """The node of the same name before, if both come from the same place."""
        a, b = self.before.values.get(key), self.after.values.get(key)
        return key if a is not None and b is not None and self._related(b, a) else None

    def _by_place(self, key: Key) -> Key | None:
        node, places = self.after.values[key].node, list[Key]()
        for reader in node.users:
            twin = self.namesake((key[0], reader.name))
            if twin is None or reader.op == "output":
                continue
            for now, was in zip(arguments(reader), arguments(self.before.values[twin].node), strict=False):
                if now is node and isinstance(was, Node) and (twin[0], was.name) in self.before.values:
                    places.append((twin[0], was.name))
        for now, was in zip(self.after.producers, self.before.producers, strict=False):
            if now == key and was is not None:
                places.append(was)
        related = [p for p in places if self._related(self.after.values[key], self.before.values[p])]
        return related[0] if related else None

    def _by_reads(self, key: Key, *, operator: bool) -> Key | None:
        """Where names do not help: a node of the same shape and inputs whose value is lost; of the same operator too
        where `operator` says so.
        """
        value, kept = self.after.values[key], set(self.same.values())
        reads = tuple(self.same.get(read) or self._input(read) for read in value.reads)
        for twin in self.alike.get(_shapes(value), ()):
            agree = twin.node.target == value.node.target or not operator
            if agree and reads and twin.reads == reads and twin.key not in kept and self._related(value, twin):
                return twin.key
        return None

    def _input(self, key: Key) -> Key | None:
        """A step's input of the same name: it has no value, and its node is its own counterpart."""
        value = self.before.values.get(key)
        return key if value is not None and value.node.op == "placeholder" and not value.reads else None

    def wrong_outputs(self) -> list[int]:
        """Indices of the outputs in which the two runs differ."""
        allowed = self.before.allowed or [0.0] * len(self.before.outputs)
        pairs = enumerate(zip(self.before.outputs, self.after.outputs, allowed, strict=False))
        return [i for i, (a, b, far) in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
                and _problem(a, b, self.bound, far)]

    def suspects(self) -> list[Key]:
        """The wrong nodes that reach a wrong output through wrong nodes only, in node order."""
        producers = [self.after.producers[i] for i in self.wrong_outputs()]
        starts = {key for key in producers if key is not None} - self.right
        wrong = reachable(starts, lambda key: set(self.after.values[key].reads) - self.right)
        return [key for key in self.after.values if key in wrong]

    def first(self) -> tuple[Key, Key] | None:
        """The first suspect that has a counterpart, and the counterpart; its inputs are right, or added by the pass."""
        wrong = [key for key in self.suspects() if self.after.values[key].tensors]
        twins = {key: self._by_reads(key, operator=True) for key in wrong}
        for find in (self.namesake, self._by_place, partial(self._by_reads, operator=False)):
            for key in wrong:
                twin = None if twins[key] else find(key)
                if twin is not None and twin not in twins.values():
                    twins[key] = twin
        return next(((key, twin) for key, twin in twins.items() if twin is not None), None)


def arguments(node: Node) -> list[Any]:
    """All arguments of a node, flat: nodes and constants."""
    return list(tree_leaves((node.args, dict(node.kwargs))))


def _shapes(value: Value) -> tuple[Any, ...]:
    return tuple((i, tensor.shape, tensor.dtype) for i, tensor in sorted(value.tensors.items()))


@dataclass(frozen=True)
class Place:
    """One node of one graph. text: its operator and arguments, as in the graph; result: dtype and shape."""

    graph: str
    name: str
    operator: str
    text: str
    result: str
    module: str
    source: str

    def __str__(self) -> str:
        return f"{self.text}, {self.result}\n{'':<9}{self.module or 'no module'}; {self.source or 'no source line'}"


def place_of(value: Value) -> Place:
    """A node's facts from its graph."""
    node, record, where = value.node, node_record(value.node), provenance(value.node)
    source = f"{where.place}: {where.text}" + (" (backward)" if where.backward else "")
    text = str(record)
    if node.op == "placeholder" and value.reads:
        text += f", which holds {value.reads[0][1]} of the forward"
    return Place(value.key[0], node.name, record.target if node.op == "call_function" else node.op, text,
                 described(node.meta.get("val")), where.module, source if where.file else "")


@dataclass(frozen=True)
class Found:
    """The first place where a check fails. record: the pass. problem: of the whole pass, one line.

    before, after: the node in the graph that the pass received and in the graph that it made; None where there is none.
    difference: how its value differs. ranks: those on which the check fails here.
    """

    record: str
    problem: str
    before: Place | None = None
    after: Place | None = None
    difference: str = ""
    ranks: tuple[int, ...] = ()


def wrong_node(whole: Found, before: Trace, after: Trace, bound: Bound) -> tuple[int, Found] | None:
    """This rank's first wrong node, or wrong output where all nodes are right, with its place in node order."""
    matching = Matching(before, after, bound)
    outputs = [i for i in matching.wrong_outputs() if before.producers[i] and after.producers[i] in matching.right]
    key: Key | None
    twin: Key | None
    if after.raised is not None:
        key, why = after.raised
        twin = key if key in before.values else None
    elif pair := matching.first():
        key, twin = pair
        why = difference(before.values[twin], after.values[key], bound) or "no value before to compare with"
    elif outputs:
        key, twin = after.producers[outputs[0]], before.producers[outputs[0]]
        assert key is not None and twin is not None
        changed = difference(before.values[twin], after.values[key], bound) or "another node is returned"
        why = f"output {outputs[0]}: {changed}"
    else:
        return None
    return [*after.values].index(key), replace(
        whole, before=place_of(before.values[twin]) if twin else None, after=place_of(after.values[key]),
        difference=why)
