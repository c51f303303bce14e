"""Recomputation without a partitioner: tagged forward nodes are repeated in the backward, where it first reads them.

The tags are those that torch's partitioner reads: activation checkpointing and resharding after the forward set them. A
node without a tag is saved. The graph stays one graph; `cut` writes what lies on either side of the border as two.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph, title
from workbench.graph.lower import PairFunction
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.nodes import is_backward, output_values
from workbench.torch_api import aot, partitioning
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.ops import draws, is_wait

AGAIN = "recomputes"
"""In a node's metadata: the name of the forward node that it repeats."""
_RECOMPUTE = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


def recomputed(graph: GraphModule) -> set[Node]:
    """The forward nodes that the backward is to compute again, by their tags.

    The last value of a region that the next region reads is saved, as torch's partitioner does it. So are draws, and
    what is computed from a buffer that the forward writes.
    """
    partitioning.save_old_values(graph)
    found = {n for n in graph.graph.nodes if n.op == "call_function" and not is_backward(n)
             and n.meta.get("recompute") in _RECOMPUTE and not draws(n)}
    found -= {n for n in found if any(u in found and _region(u) > _region(n) for u in n.users)}
    for node in list(found):  # a handle and a tuple are no values: they follow their readers
        if _parts(node):
            found |= {node.all_input_nodes[0]}
    return found


def _region(node: Node) -> int:
    return int(node.meta.get("ac_graph_id", 0))


def _parts(node: Node) -> bool:
    """Whether the node is the value of a collective's handle, or an item of an operator's results."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is None or source.op != "call_function" or is_backward(source) or draws(source):
        return False
    return is_wait(node.target) or (node.target is operator.getitem
                                    and not isinstance(source.meta.get("val"), torch.Tensor))


def place(graph: GraphModule) -> int:
    """Repeat each node of `recomputed` in front of the first backward node that reads it; returns how many.

    A repeated node reads repeated nodes, and what is saved or given for all others.
    """
    again, copies = recomputed(graph), dict[Node, Node]()
    tags = graph.graph.nodes
    backward = [node for node in tags if is_backward(node) and node.op == "call_function"]
    for reader in [*backward, graph.graph.output_node()]:
        given = reader.all_input_nodes if reader.op != "output" else _gradients(graph)
        for node in (n for n in given if n in again and not is_backward(n)):
            with graph.graph.inserting_before(reader):
                for each in _chain(node, again, copies):
                    copies[each] = _repeat(graph.graph, each, copies)
            reader.replace_input_with(node, copies[node])
    graph.recompile()
    return len(copies)


def _gradients(graph: GraphModule) -> list[Node]:
    """Outputs that are gradients; what the forward returns comes before them."""
    descs = graph.graph.output_node().meta["desc"]
    return [n for n, desc in zip(output_values(graph), descs, strict=True)
            if isinstance(n, Node) and aot.gradient_of(desc) is not None]


def _chain(node: Node, again: set[Node], copies: dict[Node, Node]) -> list[Node]:
    """The nodes without a copy that `node` is computed from, in node order, and itself."""
    found, todo = set[Node](), [node]
    while todo:
        each = todo.pop()
        if each in again and each not in found and each not in copies:
            found.add(each)
            todo += each.all_input_nodes
    return sorted(found)


def _repeat(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    made = graph.node_copy(node, lambda n: copies.get(n, n))
    made.meta["custom"] = dict(node.meta.get("custom") or {})
    made.meta |= {"partitioner_tag": "is_backward", AGAIN: node.name}
    return made


@uncollected()
def cut(joint: JointGraph) -> ForwardBackward:
    """Place the recomputation, and write forward and backward as two graphs: a border, and no decision.

    Closes `joint`. Raises WorkbenchError where it is closed already, or was captured by AOTAutograd, and for a forward
    node that reads a node of the backward.
    """
    joint.require_open()
    if not joint.traced:
        raise WorkbenchError(f"the joint graph of {title(joint.authored)} has a partitioner: call partition(joint)")
    _require_directions(joint.graph)
    graph = aot.clone(joint.graph)
    place(graph)
    with joint.context():
        forward, backward = (aot.LateBound(g, [n.meta.get("val") for n in g.graph.find_nodes(op="placeholder")])
                             for g in _sides(graph))
    joint.close()
    names = tuple(filter(None, map(aot.written_by, graph.graph.output_node().meta["desc"])))
    pair = ForwardBackward((forward, backward), joint.authored, joint.parameters, joint.buffers, _no_function,
                           joint.inputs, writes=names)
    pair.cut_from(joint.graph, joint.known)
    gradients = [aot.gradient_of(desc) for desc in backward.graph.graph.output_node().meta["desc"]]
    pair.function = PairFunction(title(joint.authored), pair.slots, [*pair.parameters, *pair.buffers], names,
                                 pair.facts.saved_order or (), gradients)
    return pair


def _no_function(*_: Any) -> Any:
    raise AssertionError


def _require_directions(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        late = next((n for n in node.all_input_nodes if is_backward(n)), None)
        if node.op == "call_function" and late is not None and not is_backward(node):
            raise WorkbenchError(
                f"node {node.name} counts as forward, and reads {late.name}, which is of the backward: a pass that "
                'makes nodes gives each its direction, node.meta["partitioner_tag"] = "is_forward" or "is_backward"')


def _sides(graph: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a graph whose recomputation is placed."""
    nodes, output = list(graph.graph.nodes), graph.graph.output_node()
    values, descs = output_values(graph), output.meta["desc"]
    ends = [aot.gradient_of(desc) is not None for desc in descs]
    behind = [n for n in nodes if is_backward(n) and n.op == "call_function"]
    read = {n for each in behind for n in each.all_input_nodes if not is_backward(n)}
    read |= {n for n, end in zip(values, ends, strict=True) if end and isinstance(n, Node) and not is_backward(n)}
    saved = [n for n in nodes if n in read and n.op != "get_attr"]
    saved.sort(key=lambda n: not isinstance(n.meta.get("val"), torch.Tensor))  # sizes last, as torch hands them over
    results = [(v, d) for v, d, end in zip(values, descs, ends, strict=True) if not end]
    gradients = [(v, d) for v, d, end in zip(values, descs, ends, strict=True) if end]
    given = [n for n in nodes if n.op == "placeholder" and not aot.is_tangent(n)]
    tangents = [n for n in nodes if n.op == "placeholder" and aot.is_tangent(n)]
    constants = [n for n in nodes if n.op == "get_attr"]
    before = [n for n in nodes if not is_backward(n) and n.op == "call_function"]
    return (_side(graph, given, [*constants, *before], [*results, *((n, None) for n in saved)]),
            _side(graph, [*saved, *tangents], [*constants, *behind], gradients))


def _side(graph: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node],
          outputs: Sequence[tuple[Any, Any]]) -> GraphModule:
    """One of the graphs. A repeated node has name and tag of what it repeats, as after torch's partitioner."""
    made, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in sorted(nodes):
        args, kwargs = (map_arg(given, copies.__getitem__) for given in (node.args, node.kwargs))
        again = {"partitioner_tag": "is_forward"} if AGAIN in node.meta else {}
        copies[node] = aot.put(made, node, node.meta.get(AGAIN, node.name), args, kwargs, dict(node.meta) | again)
    values = [copies[v] if isinstance(v, Node) else v for v, _ in outputs]
    made.output(tuple(values)).meta["desc"] = [desc for _, desc in outputs]
    made.eliminate_dead_code()
    made.lint()
    side = GraphModule(graph, made)
    side.meta = dict(graph.meta)
    return side
