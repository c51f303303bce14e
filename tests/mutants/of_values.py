"""Mutation operators on values: their dtype, strides and metadata, and what a graph returns."""

from random import Random

import torch
from mutants.edits import (
    ATEN,
    are_twins,
    drop,
    earlier,
    enter,
    exchanged,
    face,
    first,
    floating,
    inputs,
    is_start,
    mutation,
    one_of,
    pure,
    twins,
    values,
)
from on_ranks import calls, insert, reread
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.torch_api import aot


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype != torch.bfloat16 else torch.float16


def _floats(gm: GraphModule) -> list[Node]:
    return [n for n in calls(gm) if floating(n)]


@mutation("dtypes", lambda gm: [n for n in values(gm) if floating(n) and n.users])
def round_value(gm: GraphModule, rng: Random, node: Node):
    """A value is rounded to a coarser dtype and cast back."""
    dtype = node.meta["val"].dtype
    coarse = torch.float8_e4m3fn if dtype != torch.float32 else torch.bfloat16
    short = insert(gm, node, ATEN._to_copy.default, node, dtype=coarse)
    back = insert(gm, short, ATEN._to_copy.default, short, dtype=dtype)
    reread(node, back, short)
    return [node, short, back]


@mutation("dtypes", lambda gm: [n for n in _floats(gm) if n.users and not is_start(n)])
def cast_value(gm: GraphModule, rng: Random, node: Node):
    """A value is cast to another floating-point dtype, and its readers are given that."""
    short = insert(gm, node, ATEN._to_copy.default, node, dtype=_other(node.meta["val"].dtype))
    return [node, short, *reread(node, short)]


@mutation("dtypes", lambda gm: calls(gm, "aten._to_copy", "prims.convert_element_type"))
def cast_to_another_dtype(gm: GraphModule, rng: Random, node: Node):
    """A cast that was there goes to another dtype."""
    if "dtype" in node.kwargs:
        node.kwargs = {**node.kwargs, "dtype": _other(node.kwargs["dtype"])}
    elif len(node.args) == 2 and isinstance(node.args[1], torch.dtype):
        node.args = (node.args[0], _other(node.args[1]))
    else:
        return None
    return [node]


@mutation("strides", _floats)
def restride_value(gm: GraphModule, rng: Random, node: Node):
    """A value is copied into memory of the other order, and its readers are given the copy."""
    if node.meta["val"].dim() < 2 or not node.users or not pure(node):
        return None
    turned = insert(gm, node, ATEN.transpose.int, node, 0, 1)
    copied = insert(gm, turned, ATEN.clone.default, turned, memory_format=torch.contiguous_format)
    back = insert(gm, copied, ATEN.transpose.int, copied, 0, 1)
    return [node, turned, copied, back, *reread(node, back, turned)]


def _stated(change):
    """An edit that states `change` of a node's value in its metadata."""
    def edit(gm: GraphModule, rng: Random, node: Node):
        value = change(node.meta["val"])
        if value is None:
            return None
        node.meta["val"] = value
        return [node]

    return edit


def _another_dtype(value: torch.Tensor) -> torch.Tensor:
    return value.to(_other(value.dtype))


def _another_shape(value: torch.Tensor) -> torch.Tensor | None:
    return value.transpose(0, 1).contiguous() if value.dim() > 1 and value.shape[0] != value.shape[1] else None


def _other_strides(value: torch.Tensor) -> torch.Tensor | None:
    if value.dim() < 2 or min(value.shape[:2]) == 1:
        return None
    turned = value.transpose(0, 1).contiguous().transpose(0, 1)
    return turned if turned.stride() != value.stride() else None


def _without_metadata(gm: GraphModule, rng: Random, node: Node):
    node.meta = {}
    return [node]


for name, sites, edit, about in (
    ("meta_dtype", _floats, _stated(_another_dtype), "The metadata of a node states another dtype."),
    ("meta_shape", _floats, _stated(_another_shape), "The metadata of a node states another shape."),
    ("meta_stride", _floats, _stated(_other_strides), "The metadata of a node states other strides."),
    ("meta_lost", lambda gm: [n for n in calls(gm) if n.users], _without_metadata,
     "A node loses all of its metadata."),
    ("input_meta", lambda gm: [n for n in inputs(gm) if floating(n)], _stated(_another_dtype),
     "The metadata of an input states another dtype."),
):
    enter("metadata", name, about, edit, sites)


@mutation("inputs", inputs)
def swap_inputs(gm: GraphModule, rng: Random, node: Node):
    """Two inputs of the same shape and dtype change places."""
    others = twins(inputs(gm), node) if face(node) else []
    if not others:
        return None
    other = rng.choice(others)
    one, two = sorted((node, other), key=inputs(gm).index)
    before = two.prev
    one.prepend(two)
    if before is not one:
        before.append(one)
    return [node, other]


enter("inputs", "drop_input", "An input is dropped, and its readers read another one.",
      one_of(lambda gm, node: [n for n in inputs(gm) if n is not node and face(n)] if node.users else [], drop), inputs)


def _outputs(gm: GraphModule) -> list:
    return list(gm.graph.output_node().args[0])


def _return(gm: GraphModule, outputs: list, *names):
    output = gm.graph.output_node()
    output.args = (type(output.args[0])(outputs),)
    return [output, *(n for n in names if isinstance(n, Node))]


def _output(change, saved: bool = False):
    """An edit that returns `change(gm, rng, outputs, place)` for one tensor; saved: of those for the backward."""
    def edit(gm: GraphModule, rng: Random):
        outputs, facts = _outputs(gm), facts_of(gm)
        begin = 0
        if saved:
            begin = facts.step.results if facts.part == "forward" and facts.step.results else len(outputs)

        def use(place: int):
            new = change(gm, rng, outputs, place)
            if new is None:
                return None
            old, outputs[place] = outputs[place], new if isinstance(new, Node) else None
            return _return(gm, outputs, old, new)

        return first(rng, [i for i, n in enumerate(outputs) if face(n) and i >= begin], use)

    return edit


def _computed(target, *args):
    """An output is returned as the operator makes it."""
    def change(gm: GraphModule, rng: Random, outputs: list, place: int):
        node = outputs[place]
        return insert(gm, node, target, node, *args) if floating(node) else None

    return change


def _one_of(candidates):
    """An output is one of the twins among `candidates(gm, outputs, place)`."""
    def change(gm: GraphModule, rng: Random, outputs: list, place: int):
        others = twins(candidates(gm, outputs, place), outputs[place])
        return rng.choice(others) if others else None

    return change


def _older(gm: GraphModule, rng: Random, outputs: list, place: int):
    return next(iter(twins(outputs[place].all_input_nodes, outputs[place])), None)


def _one_fewer(gm: GraphModule, rng: Random):
    outputs = _outputs(gm)
    gone = outputs.pop(rng.randrange(len(outputs)))
    return _return(gm, outputs, gone)


def _exchanged(gm: GraphModule, rng: Random):
    was = _outputs(gm)
    outputs = exchanged(rng, was, lambda one, other: face(one) is not None and are_twins(one, other))
    if outputs is None:
        return None
    return _return(gm, outputs, *(new for old, new in zip(was, outputs, strict=True) if old is not new))


_ANY = _one_of(lambda gm, outputs, place: earlier(gm, gm.graph.output_node()))
for name, edit, about in (
    ("lose_output", _output(lambda gm, rng, outputs, place: "none"), "An output becomes None."),
    ("drop_output", _one_fewer, "One output fewer is returned."),
    ("zero_output", _output(_computed(ATEN.zeros_like.default)), "An output is returned as zeros."),
    ("scale_output", _output(_computed(ATEN.mul.Tensor, 2.0)), "An output is returned doubled."),
    ("replace_output", _output(_ANY), "An output is replaced by another value of the same shape and dtype."),
    ("alias_output", _output(_one_of(lambda gm, outputs, place: outputs)),
     "An output is given for another one of the same shape and dtype, too."),
    ("older_output", _output(_older),
     "An output is replaced by the value from which it was computed, of the same shape and dtype."),
    ("swap_outputs", _exchanged, "Two outputs of the same shape and dtype change places."),
    ("replace_saved", _output(_ANY, saved=True),
     "The forward saves another value of the same shape and dtype for the backward."),
):
    enter("outputs", name, about, edit)


@mutation("outputs", lambda gm: [n for n in inputs(gm) if aot.is_tangent(n) and n.users and floating(n)])
def ignore_tangent(gm: GraphModule, rng: Random, node: Node):
    """The backward reads ones in the place of the gradient that it is given."""
    ones = insert(gm, node, ATEN.ones_like.default, node)
    return [node, ones, *reread(node, ones)]
