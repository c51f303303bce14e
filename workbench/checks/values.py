"""The value of every node in a run of a pass's graphs, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from workbench.graph.read.memory import Flow
from workbench.graph.read.nodes import output_values
from workbench.recipe.wording import first_line
from workbench.torch_api.determinism import seeded
from workbench.torch_api.ops import aliased_inputs, blocks, collective_kind, is_wait, op_name, written_inputs

Key = tuple[str, str]
"""(graph, node name): the graph is joint, forward or backward."""

_UNFILLED = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.empty_permuted", "aten.new_empty",
             "aten.new_empty_strided"}


@dataclass
class Value:
    """The result of one node.

    tensors: host copies by item, 0 for a plain tensor; empty where there is none to compare: the step's inputs, sizes,
    and memory that is not filled yet. A collective's start has the value of its wait. reads: the nodes from which it is
    computed. place: (graph, collectives started before it, whether it starts one, node order): a rank's error reaches
    other ranks only through a collective of a higher place.
    """

    node: Node
    key: Key
    place: tuple[int, int, bool, int]
    reads: tuple[Key, ...]
    tensors: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)


@dataclass
class Trace:
    """A run of one joint graph, or of a forward and its backward.

    outputs: the results and the gradients, without the saved tensors; producers: the node of each, None for a constant.
    raised: the node at which the run ended, and why.
    """

    values: dict[Key, Value] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    producers: list[Key | None] = field(default_factory=list)
    raised: tuple[Key, str] | None = None


class _Recorder(Interpreter):
    """Runs a graph, and records each node's result in `trace`."""

    def __init__(self, graph: GraphModule, part: str, trace: Trace, given: dict[Node, Key]):
        super().__init__(graph)
        self.part, self.trace, self.given = part, trace, given
        self.order = 0
        self.started = 0
        self.unsettled: set[Node] = set()
        flow = Flow(graph)
        self.owner, self.writers = flow.owner, flow.writers

    def run_node(self, n: Node) -> Any:
        value = self._place(n)
        try:
            result = super().run_node(n)
        except Exception as error:
            self.trace.raised = value.key, f"raises {type(error).__name__}: {first_line(error)}"
            raise
        self._note(n, value, result)
        return result

    def _key(self, n: Node) -> Key:
        return self.part, n.name

    def _place(self, n: Node) -> Value:
        starts = n.op == "call_function" and collective_kind(n.target) is not None
        launched = self.started
        if n.op == "call_function" and is_wait(n.target):
            start = self.trace.values[self._key(_start(n))].place
            launched, starts = start[1], start[2]
        elif starts:
            self.started += 1
        reads = dict.fromkeys(map(self._key, n.all_input_nodes))
        for each in n.all_input_nodes:  # and the nodes that wrote into the memory that it reads
            reads |= {self._key(w): None for w in self.writers.get(self.owner[each], ())
                      if w is not n and self._key(w) in self.trace.values}
        if n in self.given:
            reads = {self.given[n]: None}
        place = (int(self.part == "backward"), launched, starts, self.order)
        self.order += 1
        return self.trace.values.setdefault(self._key(n), Value(n, self._key(n), place, tuple(reads)))

    def _note(self, n: Node, value: Value, result: Any) -> None:
        if n.op == "output" or (n.op == "placeholder" and n not in self.given):
            return
        if n.op == "call_function" and is_wait(n.target):
            value.tensors = _host(result, range(1))
            self._settle(n.all_input_nodes[0], value.tensors)
        elif self._unfilled(n):
            self.unsettled.add(n)
        else:
            items = {u.args[1] for u in n.users if op_name(u.target) == "operator.getitem"}
            value.tensors = _host(result, [i for i in items if isinstance(i, int)])

    def _unfilled(self, n: Node) -> bool:
        """Whether the node's memory is undefined: a collective is still running, or nothing was written yet."""
        if n.op != "call_function" or blocks(n.target):
            return False
        if collective_kind(n.target) is not None or op_name(n.target) in _UNFILLED:
            return True
        return not written_inputs(n) and any(a in self.unsettled for a in aliased_inputs(n))

    def _settle(self, handle: Node, tensors: dict[int, torch.Tensor]) -> None:
        """Give the value of a wait to its collective's start, and to the item of a start that returns several."""
        value = self.trace.values[self._key(handle)]
        if op_name(handle.target) == "operator.getitem" and not value.tensors and handle in self.unsettled:
            value.tensors = tensors
            source, item = handle.args
            if isinstance(source, Node) and isinstance(item, int) and collective_kind(source.target) is not None:
                self.trace.values[self._key(source)].tensors[item] = tensors[0]
        elif collective_kind(handle.target) is not None:
            value.tensors = tensors


def _start(wait: Node) -> Node:
    """The collective that a wait waits for; its input where there is none."""
    node = wait
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if node.op == "call_function" and collective_kind(node.target) is not None:
            return node
    return wait.all_input_nodes[0]


def _host(result: Any, items: Sequence[int] | range) -> dict[int, torch.Tensor]:
    found = {0: result} if isinstance(result, torch.Tensor) else {}
    if isinstance(result, list | tuple):
        found = {i: result[i] for i in sorted(items) if i < len(result) and isinstance(result[i], torch.Tensor)}
    return {i: t.detach().to("cpu", copy=True).contiguous() for i, t in found.items()}


def copies(values: Sequence[Any]) -> list[Any]:
    """Clones of the tensors and the other values as they are, for a run that may write to its inputs."""
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values]


def trace(
    graphs: Sequence[GraphModule], inputs: Sequence[Any], tangents: Sequence[Any], saved_order: Sequence[int] = ()
) -> Trace:
    """Run one joint graph, or a forward and its backward, on copies of one step's inputs, and keep every value.

    `saved_order`: for each of the backward's inputs before the tangents, its place among what the forward saves.
    Every rank must call it, since the graphs run their collectives. All values of the graphs are copied to the host. A
    node that raises ends the run, and is in `raised`.
    """
    found = Trace()
    inputs, tangents = copies(inputs), copies(tangents)
    with seeded(0), torch.no_grad():
        try:
            if len(graphs) == 1:
                _run(found, graphs[0], "joint", [*inputs, *tangents], {}, 0)
                return found
            forward, backward = graphs
            outputs = _run(found, forward, "forward", inputs, {}, len(saved_order))
            saved = [place + len(outputs) - len(saved_order) for place in saved_order]
            nodes, taken = output_values(forward), backward.graph.find_nodes(op="placeholder")
            given = {node: ("forward", nodes[place].name) for place, node in zip(saved, taken, strict=False)
                     if isinstance(nodes[place], Node)}
            _run(found, backward, "backward", [outputs[place] for place in saved] + tangents, given, 0)
        except Exception:
            if found.raised is None:
                raise
    return found


def _run(
    found: Trace, graph: GraphModule, part: str, args: list[Any], given: dict[Node, Key], saved: int
) -> list[Any]:
    """The graph's flat outputs, of which the last `saved` are not results of the step."""
    # flat arguments, one a placeholder, whatever the caller's convention
    outputs = _Recorder(graph, part, found, given).run(*args, enable_io_processing=False)
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    results = len(outputs) - saved
    found.outputs += outputs[:results]
    found.producers += [(part, v.name) if isinstance(v, Node) else None for v in output_values(graph)[:results]]
    return outputs
