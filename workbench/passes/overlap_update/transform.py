"""One update becomes several, each behind its gradients and behind the last read of its parameters."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import is_compute, lists_of_update, updates_of
from workbench.passes.effect import Effect
from workbench.passes.overlap_update import CONTRACT, UpdateOptions
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.torch_api.ops import tensor_bytes, written_inputs


def _behind(gm: GraphModule) -> int:
    """Matmuls and attentions that stand behind the first update."""
    nodes = list(gm.graph.nodes)
    first = min((nodes.index(update) for update in updates_of(gm)), default=len(nodes))
    return sum(is_compute(node) for node in nodes[first:])


def updates_behind_compute(before: Graphs, after: Graphs, options: UpdateOptions) -> Effect:
    """There are several updates, and some of the backward's compute stands behind the first."""
    (was,), (now,) = before, after
    evidence = {"updates": len(updates_of(now)), "compute_behind_the_first": _behind(now)}
    if len(updates_of(now)) > len(updates_of(was)) and _behind(now) > _behind(was):
        return Effect(True, "", evidence)
    reason = _why(was) or ("in every group, some gradient arrives or some parameter is read after the last matmul: "
                           "raise `groups`")
    return Effect(False, reason, evidence)


def _why(gm: GraphModule) -> str:
    """Why no part of the update may move: it needs the norm, which needs every gradient."""
    updates = updates_of(gm)
    if len(updates) != 1:
        return f"the graph has {len(updates)} updates, and this pass cuts one"
    (update,) = updates
    if update.kwargs.get("grad_scale") is not None or update.kwargs.get("found_inf") is not None:
        return _NORM
    gradients = lists_of_update(update)[1]
    scales = {n for g in gradients for n in g.all_input_nodes if not getattr(n.meta.get("val"), "shape", (1,))}
    return _NORM if any(all(scale in g.all_input_nodes for g in gradients) for scale in scales) else ""


_NORM = ('the update needs the norm of all gradients, to clip or to skip: it cannot start before the last of them; set '
         'training.clip to "off" and training.nan_norm to "apply"')


def overlap_update(gm: GraphModule, example_inputs: list[Any], *, options: UpdateOptions) -> GraphModule:
    """Cut the update, and move each part up. Where the update needs the norm, the graph stays as it is."""
    if _why(gm):
        return gm
    (update,) = updates_of(gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    *lists, _, steps = lists_of_update(update)
    owner = roots(gm)
    ready = [_ready(update, order, owner, *pair) for pair in zip(lists[0], lists[1], strict=True)]
    first = min(map(order.__getitem__, ready))
    nodes = list(order)
    for count in dict.fromkeys(n for n in steps if n.op == "call_function" and written_inputs(n)):
        if order[count] > first:  # the count is advanced before the first update reads it
            nodes[first].append(count)
    for places in _groups(ready, order, [tensor_bytes(p.meta["val"]) for p in lists[0]], options.groups):
        after = max((ready[i] for i in places), key=order.__getitem__)
        while after.next in steps:
            after = after.next
        with gm.graph.inserting_after(after):
            given = (*([nodes[i] for i in places] for nodes in lists), [], [steps[i] for i in places])
            part = gm.graph.create_node("call_function", update.target, given, dict(update.kwargs))
        part.meta = dict(update.meta)
    gm.graph.erase_node(update)
    return gm


def _ready(update: Node, order: dict[Node, int], owner: dict[Node, Node], parameter: Node, gradient: Node) -> Node:
    """The node behind which a parameter may be updated: its gradient, or the last other node that reads it."""
    readers = [n for n in order if n is not update and any(owner[r] is parameter for r in n.all_input_nodes)]
    return max([gradient, *readers], key=order.__getitem__)


def _groups(ready: list[Node], order: dict[Node, int], sizes: list[int], most: int) -> list[list[int]]:
    """Places in the lists, in the order in which they are ready, cut into at most `most` runs of about equal bytes."""
    found: list[list[int]] = []
    done, whole = 0, sum(sizes) or 1
    for place in sorted(range(len(ready)), key=lambda i: order[ready[i]]):
        if len(found) <= done * most // whole:
            found.append([])
        found[-1].append(place)
        done += sizes[place]
    return found


PASS = RegisteredPass(CONTRACT, overlap_update, updates_behind_compute)
