"""The update divides each gradient by the inverse of clipping's scale, where it reads it anyway."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import lists_of_update, updates_of
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options


def _scaled(update: Node) -> list[tuple[Node, Node, Node]]:
    """(scaled gradient, gradient, scale) of each gradient that is scaled for the update alone, all by one scalar."""
    products = [node for node in lists_of_update(update)[1]
                if node.target is torch.ops.aten.mul.Tensor and set(node.users) == {update}]
    rows: Any = [(node, *node.args) for node in products]
    scales = {scale for *_, scale in rows}
    same_scale = len(scales) == 1 and isinstance(scale := scales.pop(), Node) and not scale.meta["val"].shape
    return rows if same_scale else []


def _reads(gm: GraphModule) -> int:
    """The most often that one gradient's elements are read behind the backward: by norm, scaling and update."""
    counts = [0]
    for update in updates_of(gm):
        scaled = {node: gradient for node, gradient, _ in _scaled(update)}
        for node in lists_of_update(update)[1]:
            gradient = scaled.get(node, node)
            counts.append(len(gradient.users) + (gradient is not node))  # the update reads what the scaling wrote
    return max(counts)


def clipping_in_the_update(before: Graphs, after: Graphs, options: Options) -> Effect:
    """No gradient is scaled on its own, and each is read twice: by the norm and by the update."""
    (was,), (now,) = before, after
    scaled, left = (sum(len(_scaled(update)) for update in updates_of(gm)) for gm in (was, now))
    folded = sum(update.kwargs.get("grad_scale") is not None for update in updates_of(now))
    evidence = {"scaled_before": scaled, "scaled_after": left, "reads_before": _reads(was), "reads_after": _reads(now)}
    if not scaled:
        return Effect(False, "no gradient is scaled before the update: training.clip is off, or the scaling is part of "
                             "the update already", evidence)
    reason = (f"{left} gradients are still scaled on their own" if left else "" if folded else
              "the update does not scale the gradients")
    return Effect(not reason, reason, evidence)


@register_pass("fused_clip_adamw", effect=clipping_in_the_update)
def fused_clip_adamw(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """Fold the scaling of each update of the graph into it. Raises WorkbenchError where two gradients share memory:
    the update writes the scaled gradient back.
    """
    owner = roots(gm)
    for update in updates_of(gm):
        scaled = _scaled(update)
        if len(scaled) != len(lists_of_update(update)[1]):
            continue
        places = {node: (owner[node], node.meta["val"].storage_offset()) for _, node, _ in scaled}
        shared = [node.name for _, node, _ in scaled if [places[n] for _, n, _ in scaled].count(places[node]) > 1]
        if shared:
            raise WorkbenchError(f"pass 'fused_clip_adamw' on the step graph: gradients {' and '.join(shared[:2])} "
                                 "share memory, and the update would scale them twice: drop the pass")
        scale = scaled[0][2]
        with gm.graph.inserting_before(update):
            inverse = gm.graph.call_function(torch.ops.aten.reciprocal.default, (scale,))
        inverse.meta = {**scale.meta}
        update.args = (update.args[0], [gradient for _, gradient, _ in scaled], *update.args[2:])
        update.kwargs = {**update.kwargs, "grad_scale": inverse}
        for node, *_ in scaled:
            gm.graph.erase_node(node)
    return gm
