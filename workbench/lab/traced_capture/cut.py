"""Recomputation without a partitioner: tagged forward nodes are repeated in the backward, where it first reads them.

The tags are those that torch's partitioner reads: activation checkpointing and resharding after the forward set them. A
node without a tag is saved. The graph stays one graph; `cut` writes what lies on either side of the border as two.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph, title
from workbench.graph.pair_function import PairFunction
from workbench.graph.partition import ForwardBackward
from workbench.graph.pieces import named_outputs
from workbench.graph.read.nodes import is_backward, output_values, reachable
from workbench.torch_api import aot, partitioning
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.ops import is_random, is_wait
from workbench.torch_api.subgraph import subgraph

AGAIN = "recomputes"
"""In a node's metadata: the name of the forward node that it repeats."""
_RECOMPUTE = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


def recomputed(graph: GraphModule) -> set[Node]:
    """The forward nodes that the backward is to compute again, by their tags.

    The last value of a region that the next region reads is saved, as torch's partitioner does it. So are draws, and
    what is computed from a buffer that the forward writes.
    """
    partitioning.save_old_values(graph)
    tagged = {n for n in graph.graph.nodes if n.op == "call_function" and not is_backward(n)
              and n.meta.get("recompute") in _RECOMPUTE and not is_random(n)}
    region = {n: int(n.meta.get("ac_graph_id", 0)) for n in tagged}
    again = {n for n in tagged if not any(u in tagged and region[u] > region[n] for u in n.users)}
    # a handle and a tuple are no values: they follow their readers
    return again | {n.all_input_nodes[0] for n in again if _parts(n)}


def _parts(node: Node) -> bool:
    """Whether the node is the value of a collective's handle, or an item of an operator's results."""
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    if source is node or source.op != "call_function" or is_backward(source) or is_random(source):
        return False
    item = node.target is operator.getitem and not isinstance(source.meta.get("val"), torch.Tensor)
    return item or is_wait(node.target)


def place(graph: GraphModule) -> None:
    """Repeat each node of `recomputed` before the first backward node that reads it, from repeats where there are."""
    again, copies = recomputed(graph), dict[Node, Node]()

    def not_copied(node: Node) -> list[Node]:
        return [n for n in node.all_input_nodes if n in again and n not in copies]

    backward = [node for node in graph.graph.nodes if is_backward(node) and node.op == "call_function"]
    for reader in [*backward, graph.graph.output_node()]:
        inputs = reader.all_input_nodes if reader.op != "output" else [node for _, node in gradients_of(graph)]
        for node in (n for n in inputs if n in again):
            with graph.graph.inserting_before(reader):
                for first in sorted(reachable({node} - copies.keys(), not_copied)):
                    repeat = copies[first] = graph.graph.node_copy(first, lambda n: copies.get(n, n))
                    repeat.meta["custom"] = dict(first.meta.get("custom") or {})
                    repeat.meta |= {"partitioner_tag": "is_backward", AGAIN: first.name}
            reader.replace_input_with(node, copies[node])
    graph.recompile()


def gradients_of(graph: GraphModule) -> list[tuple[str, Node]]:
    """(parameter, node) of each output that is a gradient."""
    return [(name, node) for node, desc in named_outputs(graph)
            if (name := aot.gradient_of(desc)) is not None]


@uncollected()
def cut(joint: JointGraph) -> ForwardBackward:
    """Place the recomputation, and write forward and backward as two graphs: a border, and no decision.

    Closes `joint`. Raises WorkbenchError where it is closed already, or was captured by AOTAutograd, and for a forward
    node that reads a node of the backward.
    """
    joint.require_open()
    if joint.cut is None:
        raise WorkbenchError(f"the joint graph of {title(joint.authored)} has a partitioner: call partition(joint)")
    _require_directions(joint.graph)
    graph = aot.clone(joint.graph)
    place(graph)
    with joint.context():
        slots = tuple(aot.LateBound(side, [n.meta.get("val") for n in side.graph.find_nodes(op="placeholder")])
                      for side in _sides(graph))
    joint.close()
    forward, backward = (slot.graph.graph.output_node().meta["desc"] for slot in slots)
    written = tuple(partitioning.written_names(slots[0].graph))
    function = PairFunction(title(joint.authored), slots, [*joint.parameters, *joint.buffers], written,
                            range(forward.count(None)), [aot.gradient_of(desc) for desc in backward])
    pair = ForwardBackward(slots, joint.authored, joint.parameters, joint.buffers, function, joint.inputs,
                           writes=written)
    pair.cut_from(joint.graph, joint.known)
    return pair


def _require_directions(graph: GraphModule) -> None:
    for node in graph.graph.nodes:
        late = next((n for n in node.all_input_nodes if is_backward(n)), None)
        if node.op == "call_function" and late is not None and not is_backward(node):
            raise WorkbenchError(
                f"node {node.name} counts as forward, and reads {late.name}, which is of the backward: a pass that "
                'makes nodes gives each its direction, node.meta["partitioner_tag"] = "is_forward" or "is_backward"')


def _sides(graph: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Forward and backward of a graph whose recomputation is placed."""
    inputs = graph.graph.find_nodes(op="placeholder")
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    early, late = ([n for n in calls if is_backward(n) is backward] for backward in (False, True))
    tangents = [n for n in inputs if aot.is_tangent(n)]
    primals = [n for n in inputs if n not in tangents]
    outputs = list(zip(output_values(graph), graph.graph.output_node().meta["desc"], strict=True))
    gradients = [row for row in outputs if aot.gradient_of(row[1]) is not None]
    results = [row for row in outputs if row not in gradients]
    read = {value for value, _ in gradients}.union(*(n.all_input_nodes for n in late))
    saved = [n for n in (*primals, *early) if n in read]
    saved.sort(key=lambda n: not isinstance(n.meta.get("val"), torch.Tensor))  # sizes last, as torch hands them over
    results += [(n, None) for n in saved]
    forward = subgraph(graph, primals, results, {n.name for n in early})
    backward = subgraph(graph, [*saved, *tangents], gradients, {n.name for n in late})
    for node in backward.graph.nodes:
        if AGAIN in node.meta:  # it has name and tag of what it repeats, as after torch's partitioner
            node.name, node.meta["partitioner_tag"] = node.meta[AGAIN], "is_forward"
    backward.recompile()
    return forward, backward
