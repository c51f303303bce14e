"""Between our metadata and graph_trainer's: direction and module of a node, and what a pass leaves out of new ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Module

from workbench.graph.facts import GraphFacts, Part, StepFacts
from workbench.graph.make_nodes import fake_mode_of
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.nodes import is_backward, module_path
from workbench.recipe.wording import counted, few
from workbench.torch_api.distributed.fake import FakeTensor, new_fake_mode
from workbench.torch_api.ops import world_kind

DIRECTION = "autograd_backward"
TAG = "partitioner_tag"
MODULE = "module_fqn"


def is_whole(gm: GraphModule) -> bool:
    """Whether make_fx traced the graph, with its backward, by torchtitan's graph_trainer."""
    inputs = gm.graph.find_nodes(op="placeholder")
    directed = any(DIRECTION in node.meta for node in gm.graph.nodes)
    return directed and not any("desc" in node.meta for node in inputs)


def read_in(gm: GraphModule) -> None:
    """Direction and modules of each node where our passes and checks look for them, and values of one fake mode."""
    _share_mode(gm)
    for node in gm.graph.nodes:
        if TAG not in node.meta:
            _direct(node, node.meta.get(DIRECTION, False))
        _place(node, _custom(node).get(MODULE, ""))


def write_out(gm: GraphModule, renames: Mapping[str, str] | None = None) -> None:
    """Direction and module of each node where graph_trainer's passes look for them.

    renames: parts of our module paths, and what stands for them there, such as {"output": "lm_head"}.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in calls:  # not the output, which a pass would take for a reader in the backward
        if is_backward(node) or any(source.meta.get(DIRECTION) for source in node.all_input_nodes):
            node.meta[DIRECTION] = True
        if path := module_path(node):
            node.meta["custom"] = {MODULE: renamed(path, renames or {})} | _custom(node)


def renamed(path: str, renames: Mapping[str, str]) -> str:
    """`layers.0.moe.experts` with {"moe.experts": "moe.inner"} is `layers.0.moe.inner`."""
    text = f".{path}."
    for old, new in renames.items():
        text = text.replace(f".{old}.", f".{new}.")
    return text.strip(".")


def facts_outside(gm: GraphModule, part: Part, step: StepFacts | None = None) -> GraphFacts:
    """Facts of a graph that was captured elsewhere: without a mesh, groups stand for axes.

    They are numbered in the order of the graph, since their names differ between ranks.
    """
    sizes = {collective.group: collective.group_size for collective in list_collectives(gm)}
    groups = {f"group {number}": name for number, name in enumerate(sizes)}
    return GraphFacts(part, groups, sizes, world_kind() or "one process", [], step or StepFacts())


@dataclass(frozen=True)
class Filled:
    """The new nodes of a pass, and how many of them came without a value, a direction or a module.

    left: those whose value their inputs do not tell.
    """

    new: int = 0
    values: int = 0
    directions: int = 0
    modules: int = 0
    left: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = {"value": self.values, "direction": self.directions, "module": self.modules}
        missing = [f"{count:,} came without a {name}" for name, count in counts.items() if count]
        if not missing:
            return ""
        text = f"of {counted(self.new, 'new node')}, {', '.join(missing)}, filled in here"
        return f"{text} but for the value of {few(self.left, 3)}" if self.left else text


def fill_in(gm: GraphModule, known: Collection[str]) -> Filled:
    """Give nodes whose names are not `known` a value, a direction and a module, where they have none.

    Returns what was filled in. A node belongs to the backward where it reads the backward, or where the backward alone
    reads it. Its module is what those of its inputs have in common, or else those of its readers.
    """
    new = [n for n in gm.graph.nodes if n.op == "call_function" and n.name not in known]
    valueless = [node for node in new if "val" not in node.meta]
    left = tuple(node.name for node in valueless if not _evaluate(node, fake_mode_of(gm)))
    placeless = [node for node in new if not module_path(node) and MODULE not in _custom(node)]
    aimless = [node for node in new if DIRECTION not in node.meta and TAG not in node.meta]
    for node in new:
        _direct(node, node.meta.get(DIRECTION, is_backward(node)))
    for node in aimless:
        _direct(node, any(map(is_backward, node.all_input_nodes)))
    for node in reversed(aimless):
        if node.users and all(map(is_backward, node.users)):
            _direct(node, True)
    for node in placeless:
        _place_as(node, node.all_input_nodes)
    for node in reversed(placeless):
        _place_as(node, node.users)
    for node in new:
        _place(node, _custom(node).get(MODULE, ""))
    return Filled(len(new), len(valueless), len(aimless), len(placeless), left)


def _custom(node: Node) -> dict[str, str]:
    return node.meta.get("custom") or {}


def _direct(node: Node, backward: bool) -> None:
    node.meta[TAG] = "is_backward" if backward else "is_forward"
    if backward:
        node.meta[DIRECTION] = True


def _place(node: Node, path: str) -> None:
    """Note the module where torch notes it, with those around it; nothing where the node has one."""
    if not path or module_path(node):
        return
    parts = path.split(".")
    outer = [".".join(parts[: i + 1]) for i in range(len(parts))]
    key = "fwd_nn_module_stack" if is_backward(node) else "nn_module_stack"
    node.meta[key] = {name: (name, Module) for name in outer}


def _place_as(node: Node, neighbours: Iterable[Node]) -> None:
    """The module that is around all neighbours, and the source line of the first, for a node without."""
    theirs = _common(_custom(n).get(MODULE, "") for n in neighbours)
    if theirs:
        node.meta["custom"] = {MODULE: theirs} | _custom(node)
    _place(node, _common(map(module_path, neighbours)))
    traces = [n.meta["stack_trace"] for n in neighbours if n.meta.get("stack_trace")]
    if traces:
        node.meta.setdefault("stack_trace", traces[0])


def _share_mode(gm: GraphModule) -> None:
    """Compute all values in one mode, where make_fx traced real tensors and gave each value a mode of its own."""
    values = [node.meta.get("val") for node in gm.graph.nodes]
    if len({value.fake_mode for value in values if isinstance(value, FakeTensor)}) < 2:
        return
    mode = new_fake_mode()
    for node, value in zip(gm.graph.nodes, values, strict=True):
        if node.op == "call_function":
            _evaluate(node, mode)
        elif isinstance(value, torch.Tensor):
            with mode:
                node.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )


def _common(paths: Iterable[str]) -> str:
    """The path that these begin with, of those that are not empty."""
    columns = zip(*(path.split(".") for path in paths if path), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, columns))


def _evaluate(node: Node, mode: Any) -> bool:
    """Compute the node's fake value from those of its inputs; whether that was possible."""
    target: Any = node.target
    try:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode or nullcontext(), torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)
    except Exception:
        return False
    return True
