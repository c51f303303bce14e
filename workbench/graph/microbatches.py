"""Forward and backward of each microbatch in one graph: which nodes are repeated, and what is added up.

A gathered weight that the forward saves for the backward is gathered once, by the first microbatch. One that the
backward gathers again is gathered again by each microbatch. Data-parallel reductions of gradients run once, behind the
last microbatch, on sums of what each microbatch would reduce. Reductions of tensor parallelism run in each microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.authoring.microbatches import summed_buffers
from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward, saved_nodes
from workbench.graph.read.collectives import Groups
from workbench.graph.read.memory import Flow, parameter_gathers, roots
from workbench.graph.read.nodes import kind_of, output_values
from workbench.torch_api import aot
from workbench.torch_api.ops import collective_kind, group_name_of, is_symbolic, op_name, written_inputs

Values = dict[Node, Any]
_MOVES = ("collective", "wait", "view", "copy", "create", "bookkeeping")
_SCALES = ("aten.mul", "aten.div")
PAIR = 'set training.step to "pair"'
"""What to do where a step cannot be joined."""


def behind_reductions(backward: GraphModule) -> dict[Node, None]:
    """The data-parallel reductions of a backward and every node that depends on one, in node order."""
    groups, found = Groups(facts_of(backward)), dict[Node, None]()
    for node in backward.graph.nodes:
        reduces = node.op == "call_function" and collective_kind(node.target) in ("reduce_scatter", "all_reduce")
        behind = any(n in found for n in node.all_input_nodes)
        if node.op != "output" and (behind or (reduces and groups.axis(group_name_of(node)) != "tp")):
            found[node] = None
    return found


def gathered_once(forward: GraphModule, saved: Iterable[Any]) -> set[Node]:
    """The nodes that gather the parameters which `forward` saves: equal in all microbatches, and kept in any case."""
    flow, found = Flow(forward), set[Node]()
    gathers = set(parameter_gathers(forward, flow))
    for node in saved:
        behind, todo = set[Node](), [node] if isinstance(node, Node) and flow.parameters(node) else []
        while todo:
            each = todo.pop()
            if each not in behind:
                behind.add(each)
                todo += [*each.all_input_nodes, *flow.writers.get(each, ())]
        if behind & gathers:
            found |= behind
    return {node for node in found if node.op == "call_function"}


def gradients_of(backward: GraphModule) -> dict[str, Node]:
    """The node of each parameter's gradient, or of its local part, by the parameter's name."""
    found = {}
    for node, desc in zip(output_values(backward), backward.graph.output_node().meta["desc"], strict=True):
        name = aot.gradient_of(desc)
        if name is not None and isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
            found[name] = node
    return found


@dataclass
class Microbatches:
    """`graph` with the nodes of `count` forwards and backwards of a pair.

    copies: for each microbatch, the copy of each of the pair's nodes. inputs: parameters and buffers by name.
    gradients: by parameter, reduced. sums: by node of the backward, the sum of its copies. attributes: of the graph.
    """

    pair: ForwardBackward
    count: int = 1
    graph: Graph = field(default_factory=Graph)
    copies: list[Values] = field(default_factory=list)
    inputs: dict[str, Node] = field(default_factory=dict)
    gradients: dict[str, Node] = field(default_factory=dict)
    sums: dict[Node, Node] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        forward, backward = self.pair.graphs
        saved = saved_nodes(forward, backward)
        given = self._inputs(forward)
        last, shared, terms = dict[Node, None](), set[Node](), set[Node]()
        if self.count > 1:
            _require_static(self.pair)
            last, shared = behind_reductions(backward), gathered_once(forward, saved)
            terms = _terms(self.pair, last)
        placeholders = backward.graph.find_nodes(op="placeholder")
        taken = [n for n in placeholders if not aot.is_tangent(n)]
        for index in range(self.count):
            held: Values = {node: self._part(value, index) for node, value in given.items()}
            if index:
                held |= {node: self.copies[0][node] for node in shared}
                held |= {node: self.copies[-1][value] for node, value in self._written().items()}
            self._copy(forward, "forward", held)
            held |= {node: held[kept] for node, kept in zip(taken, saved, strict=True)}
            held |= {node: self._ones(node) for node in placeholders if aot.is_tangent(node)}
            for node in sorted(terms & held.keys()):
                self._add(node, held)
            self._copy(backward, "backward", held, last, terms, ends=index == self.count - 1)
            self.copies.append(held)
        for name, node in gradients_of(backward).items():
            self.gradients[name] = self.sums[node] if node in self.sums else self.copies[-1][node]

    def loss(self) -> Node:
        """Append the mean of the losses; what the forward returns as new values of buffers is written into them.

        Raises WorkbenchError where the module returns anything but one loss.
        """
        forward, written = self.pair.forward, self._written()
        results = output_values(forward)[:facts_of(forward).step.results]
        descs = forward.graph.output_node().meta["desc"]
        losses = [n for n, desc in zip(results, descs, strict=False) if aot.written_by(desc) is None]
        summed = summed_buffers(self.pair.authored.module)
        for placeholder, value in written.items():
            name = str(aot.parameter_of(placeholder))
            made = self._total(value) if name in summed else self.copies[-1][value]
            self._call(torch.ops.aten.copy_.default, self.inputs[name], made, value=placeholder.meta["val"])
        if len(losses) != 1 or losses[0].meta["val"].numel() != 1:
            raise refused(self.pair, f"the module returns {len(losses)} results, and a whole step takes one loss: "
                                     "return the loss alone")
        total = self._total(losses[0])
        return total if self.count == 1 else self._call(torch.ops.aten.div.Tensor, total, self.count)

    def _written(self) -> dict[Node, Node]:
        """The placeholder of each buffer that the forward writes, and the node of its new value."""
        forward = self.pair.forward
        values = dict[str | None, Node]()
        for node, desc in zip(output_values(forward), forward.graph.output_node().meta["desc"], strict=False):
            if (name := aot.written_by(desc)) is not None:
                values[name] = node
        inputs = forward.graph.find_nodes(op="placeholder")
        return {n: values[name] for n in inputs if (name := aot.parameter_of(n)) in values and _is_tensor(n)}

    def _inputs(self, forward: GraphModule) -> Values:
        """A copy of each placeholder; those of the batch hold the rows of all microbatches."""
        found: Values = {}
        for node in forward.graph.find_nodes(op="placeholder"):
            made = found[node] = self.graph.node_copy(node)
            made.meta["custom"] = dict(node.meta.get("custom") or {})
            name, value = aot.parameter_of(node), node.meta.get("val")
            if name is not None and _is_tensor(node):
                self.inputs[name] = made
            elif name is None and self.count > 1:
                if not _is_tensor(node) or not value.dim():
                    raise refused(self.pair, f"input {node.name} has no first dim to cut into {self.count} "
                                             "microbatches: give it one")
                made.meta["val"] = value.new_empty((self.count * value.shape[0], *value.shape[1:]))
        return found

    def _part(self, given: Node, index: int) -> Node:
        """A placeholder's copy, or the rows of one microbatch."""
        if self.count == 1 or aot.parameter_of(given) is not None:
            return given
        rows = given.meta["val"].shape[0] // self.count
        return self._call(torch.ops.aten.slice.Tensor, given, 0, index * rows, (index + 1) * rows)

    def _ones(self, tangent: Node) -> Node:
        """The gradient of the mean loss by one microbatch's."""
        value = tangent.meta["val"]
        ones = self.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 1 / self.count),
                                        {"dtype": value.dtype, "device": value.device, "pin_memory": False})
        ones.meta["val"] = value
        return ones

    def _copy(self, source: GraphModule, part: str, held: Values, last: Collection[Node] = (),
              terms: Collection[Node] = (), ends: bool = True) -> None:
        """Append the nodes of `source` that have no copy yet, and add up those in `terms`.

        Nodes in `last` are copied where this microbatch `ends` the step; they read the sums.
        """
        for node in source.graph.nodes:
            if node.op == "output" or node in held or (node in last and not ends):
                continue
            read = {**held, **self.sums} if node in last else held
            made = held[node] = self.graph.node_copy(node, read.__getitem__)
            made.meta["custom"] = dict(node.meta.get("custom") or {})
            if node.op == "get_attr":
                made.target = f"{part}_{str(node.target).replace('.', '_')}"
                self.attributes[made.target] = attrgetter(str(node.target))(source)
            if node in terms:
                self._add(node, held)

    def _add(self, node: Node, held: Values) -> None:
        """Add this microbatch's copy of `node` to the sum of the earlier ones'."""
        if node not in self.sums:
            self.sums[node] = held[node]
            return
        self.sums[node] = self._call(torch.ops.aten.add.Tensor, self.sums[node], held[node])
        self.sums[node].meta = {k: v for k, v in node.meta.items() if "nn_module_stack" in k} | self.sums[node].meta

    def _total(self, node: Node) -> Node:
        total: Node = self.copies[0][node]
        for held in self.copies[1:]:
            total = self._call(torch.ops.aten.add.Tensor, total, held[node])
        return total

    def _call(self, target: Any, *args: Any, value: Any = None) -> Node:
        """Append a call; `value` is its fake result, computed where it is not given."""
        made = self.graph.call_function(target, args)
        made.meta["val"] = value if value is not None else target(
            *(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        return made


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def refused(pair: ForwardBackward, why: str) -> WorkbenchError:
    """The error for a step that cannot be joined: why, and what to do."""
    return WorkbenchError(f"the whole step of {title(pair.authored)}: {why}, or {PAIR}")


def _require_static(pair: ForwardBackward) -> None:
    for graph in pair.graphs:
        for node in graph.graph.nodes:
            if is_symbolic(node.meta.get("val")):
                raise refused(pair, f"the size of {node.name} is read from the device, and a step of several "
                                    "microbatches needs sizes that are the same in all: give it a static size")


def _terms(pair: ForwardBackward, last: Collection[Node]) -> set[Node]:
    """The backward's nodes to add up: gradients that are not reduced, and what the nodes in `last` read.

    Raises WorkbenchError where the sum, reduced, is not the sum of what each microbatch would give.
    """
    backward = pair.backward
    found = {node for node in gradients_of(backward).values() if node not in last}
    for node in last:
        name = op_name(node.target)
        if kind_of(node) not in _MOVES and name != "aten.add" and not (
                name in _SCALES and len(node.all_input_nodes) == 1):
            raise refused(pair, f"{node.name} ({name}) reads a reduction over data-parallel ranks in the backward, and "
                                "only sums of gradients can be reduced once for several microbatches: drop it")
        found |= {n for n in node.all_input_nodes if n not in last and _is_tensor(n)}
    owner = roots(backward)
    filled = {owner[written] for n in backward.graph.nodes if n not in last for written in written_inputs(n)}
    for node in found:
        if owner[node] in filled:
            raise refused(pair, f"the backward writes into {owner[node].name}, which holds gradients, in place, and a "
                                "step of several microbatches adds up new values: return a new tensor")
    return {node for node in found if kind_of(node) != "create"}
