"""Mutation operators on values: their dtype, strides and metadata, and what a graph returns."""

from __future__ import annotations

from random import Random

import torch
from mutants.edits import ATEN, calls, earlier, face, first, floating, insert, is_start, mutation, pure, reread, values
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.torch_api import aot


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype != torch.bfloat16 else torch.float16


@mutation("dtypes", lambda gm: [n for n in values(gm) if floating(n) and n.users])
def round_value(gm: GraphModule, rng: Random, node: Node):
    """A value is rounded to a coarser dtype and cast back."""
    dtype = node.meta["val"].dtype
    short = insert(gm, node, ATEN._to_copy.default, node, dtype=torch.float8_e4m3fn if dtype != torch.float32
                   else torch.bfloat16)
    back = insert(gm, short, ATEN._to_copy.default, short, dtype=dtype)
    reread(node, back, short)
    return [node, short, back]


@mutation("dtypes", lambda gm: [n for n in calls(gm) if floating(n) and n.users and not
          is_start(n)])
def cast_value(gm: GraphModule, rng: Random, node: Node):
    """A value is cast to another floating-point dtype, and its readers are given that."""
    short = insert(gm, node, ATEN._to_copy.default, node, dtype=_other(node.meta["val"].dtype))
    users = [u.name for u in node.users]
    reread(node, short)
    return [node, short, *users]


@mutation("dtypes", lambda gm: calls(gm, "aten._to_copy", "prims.convert_element_type"))
def cast_to_another_dtype(gm: GraphModule, rng: Random, node: Node):
    """A cast that was there goes to another dtype."""
    if "dtype" in node.kwargs:
        node.kwargs = {**node.kwargs, "dtype": _other(node.kwargs["dtype"])}
        return [node]
    if len(node.args) == 2 and isinstance(node.args[1], torch.dtype):
        node.args = (node.args[0], _other(node.args[1]))
        return [node]
    return None


@mutation("strides", lambda gm: [n for n in calls(gm) if floating(n)])
def restride_value(gm: GraphModule, rng: Random, node: Node):
    """A value is copied into memory of the other order, and its readers are given the copy."""
    if node.meta["val"].dim() < 2 or not node.users or not pure(node):
        return None
    turned = insert(gm, node, ATEN.transpose.int, node, 0, 1)
    copied = insert(gm, turned, ATEN.clone.default, turned, memory_format=torch.contiguous_format)
    back = insert(gm, copied, ATEN.transpose.int, copied, 0, 1)
    users = [u.name for u in node.users]
    reread(node, back, turned)
    return [node, turned, copied, back, *users]


@mutation("metadata", lambda gm: [n for n in calls(gm) if floating(n)])
def meta_dtype(gm: GraphModule, rng: Random, node: Node):
    """The metadata of a node states another dtype."""
    node.meta["val"] = node.meta["val"].to(_other(node.meta["val"].dtype))
    return [node]


@mutation("metadata", lambda gm: [n for n in calls(gm) if floating(n)])
def meta_shape(gm: GraphModule, rng: Random, node: Node):
    """The metadata of a node states another shape."""
    value = node.meta["val"]
    if value.dim() < 2 or value.shape[0] == value.shape[1]:
        return None
    node.meta["val"] = value.transpose(0, 1).contiguous()
    return [node]


@mutation("metadata", lambda gm: [n for n in calls(gm) if floating(n)])
def meta_stride(gm: GraphModule, rng: Random, node: Node):
    """The metadata of a node states other strides."""
    value = node.meta["val"]
    if value.dim() < 2 or min(value.shape[:2]) == 1:
        return None
    node.meta["val"] = value.transpose(0, 1).contiguous().transpose(0, 1)
    return [node] if node.meta["val"].stride() != value.stride() else None


@mutation("metadata", lambda gm: [n for n in calls(gm) if n.users])
def meta_lost(gm: GraphModule, rng: Random, node: Node):
    """A node loses all of its metadata."""
    node.meta = {}
    return [node]


@mutation("metadata", lambda gm: [n for n in gm.graph.find_nodes(op="placeholder") if floating(n)])
def input_meta(gm: GraphModule, rng: Random, node: Node):
    """The metadata of an input states another dtype."""
    node.meta["val"] = node.meta["val"].to(_other(node.meta["val"].dtype))
    return [node]


@mutation("inputs")
def swap_inputs(gm: GraphModule, rng: Random):
    """Two inputs of the same shape and dtype change places."""
    inputs = gm.graph.find_nodes(op="placeholder")

    def use(node: Node):
        twins = [n for n in inputs if face(n) == face(node) and n is not node and face(n)]
        if not twins:
            return None
        other = rng.choice(twins)
        one, two = sorted((node, other), key=inputs.index)
        if one.next is not two:
            before = two.prev
            one.prepend(two)
            before.append(one)
        else:
            one.prepend(two)
        return [node, other]
    return first(rng, inputs, use)


@mutation("inputs", lambda gm: gm.graph.find_nodes(op="placeholder"))
def drop_input(gm: GraphModule, rng: Random, node: Node):
    """An input is dropped, and its readers read another one."""
    others = [n for n in gm.graph.find_nodes(op="placeholder") if n is not node and face(n)]
    if not others or not node.users:
        return None
    names = [node.name, *(u.name for u in node.users)]
    node.replace_all_uses_with(rng.choice(others))
    gm.graph.erase_node(node)
    return names


def _outputs(gm: GraphModule) -> list:
    return list(gm.graph.output_node().args[0])


def _return(gm: GraphModule, outputs: list, *names):
    gm.graph.output_node().args = (type(gm.graph.output_node().args[0])(outputs),)
    return [gm.graph.output_node(), *(n for n in names if isinstance(n, Node))]


def _output(gm: GraphModule, rng: Random, change, saved: bool | None = None):
    """One output, where `change(outputs, place)` gives another value for it; only a saved one, or none of these."""
    outputs, results = _outputs(gm), facts_of(gm).step.results
    forward = facts_of(gm).part == "forward"
    places = [i for i, n in enumerate(outputs) if face(n)
              and (saved is None or saved == (forward and bool(results) and i >= results))]

    def use(place: int):
        new = change(outputs, place)
        if new is None:
            return None
        old, outputs[place] = outputs[place], new if isinstance(new, Node) else None
        return _return(gm, outputs, old, new)
    return first(rng, places, use)


@mutation("outputs")
def lose_output(gm: GraphModule, rng: Random):
    """An output becomes None."""
    return _output(gm, rng, lambda outputs, place: "none")


@mutation("outputs")
def drop_output(gm: GraphModule, rng: Random):
    """One output fewer is returned."""
    outputs = _outputs(gm)
    gone = outputs.pop(rng.randrange(len(outputs)))
    return _return(gm, outputs, gone)


@mutation("outputs")
def zero_output(gm: GraphModule, rng: Random):
    """An output is returned as zeros."""
    return _output(gm, rng, lambda outputs, place: insert(gm, outputs[place], ATEN.zeros_like.default, outputs[place])
                   if floating(outputs[place]) else None)


@mutation("outputs")
def scale_output(gm: GraphModule, rng: Random):
    """An output is returned doubled."""
    return _output(gm, rng, lambda outputs, place: insert(gm, outputs[place], ATEN.mul.Tensor, outputs[place], 2.0)
                   if floating(outputs[place]) else None)


@mutation("outputs")
def replace_output(gm: GraphModule, rng: Random):
    """An output is replaced by another value of the same shape and dtype."""
    def change(outputs: list, place: int):
        twins = [n for n in earlier(gm, gm.graph.output_node()) if face(n) == face(outputs[place])
                 and n is not outputs[place]]
        return rng.choice(twins) if twins else None
    return _output(gm, rng, change)


@mutation("outputs")
def alias_output(gm: GraphModule, rng: Random):
    """An output is given for another one of the same shape and dtype, too."""
    def change(outputs: list, place: int):
        twins = [n for n in outputs if face(n) == face(outputs[place]) and n is not outputs[place]]
        return rng.choice(twins) if twins else None
    return _output(gm, rng, change)


@mutation("outputs")
def older_output(gm: GraphModule, rng: Random):
    """An output is replaced by the value from which it was computed, of the same shape and dtype."""
    def change(outputs: list, place: int):
        twins = [n for n in outputs[place].all_input_nodes if face(n) == face(outputs[place])]
        return twins[0] if twins else None
    return _output(gm, rng, change)


@mutation("outputs")
def swap_outputs(gm: GraphModule, rng: Random):
    """Two outputs of the same shape and dtype change places."""
    outputs = _outputs(gm)
    pairs = [(i, j) for j in range(len(outputs)) for i in range(j)
             if face(outputs[i]) and face(outputs[i]) == face(outputs[j]) and outputs[i] is not outputs[j]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    outputs[i], outputs[j] = outputs[j], outputs[i]
    return _return(gm, outputs, outputs[i], outputs[j])


@mutation("outputs")
def replace_saved(gm: GraphModule, rng: Random):
    """The forward saves another value of the same shape and dtype for the backward."""
    def change(outputs: list, place: int):
        twins = [n for n in earlier(gm, gm.graph.output_node()) if face(n) == face(outputs[place])
                 and n is not outputs[place]]
        return rng.choice(twins) if twins else None
    return _output(gm, rng, change, saved=True)


@mutation("outputs", lambda gm: [n for n in gm.graph.find_nodes(op="placeholder") if
          aot.is_tangent(n) and n.users and floating(n)])
def ignore_tangent(gm: GraphModule, rng: Random, node: Node):
    """The backward reads ones in the place of the gradient that it is given."""
    ones = insert(gm, node, ATEN.ones_like.default, node)
    users = [u.name for u in node.users]
    reread(node, ones)
    return [node, ones, *users]
