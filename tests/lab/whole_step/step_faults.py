"""Faults to plant in the graph of a whole step: each takes a GraphModule and changes it in place."""

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.memory import roots


def update_of(gm: GraphModule) -> Node:
    (found,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._fused_adamw_.tensor_lr)
    return found


def leaves_a_gradient_out_of_the_norm(gm: GraphModule) -> None:
    stack = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)[-1]
    stack.args = (stack.args[0][1:], *stack.args[1:])


def forgets_the_step_count(gm: GraphModule) -> None:
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
    add.replace_all_uses_with(add.args[0])
    gm.graph.erase_node(add)


def swaps_two_gradients(gm: GraphModule) -> None:
    """Of the first two parameters of one shape."""
    update = update_of(gm)
    gradients = list(update.args[1])
    shapes = [tuple(p.meta["val"].shape) for p in update.args[0]]
    i, j = next((i, j) for i in range(len(shapes)) for j in range(i) if shapes[i] == shapes[j])
    gradients[i], gradients[j] = gradients[j], gradients[i]
    update.args = (update.args[0], gradients, *update.args[2:])


def updates_before_the_last_read(gm: GraphModule) -> None:
    """One parameter's update moves behind its gradient, and the last node that reads the parameter behind the update.

    Without clipping, the graph computes the same otherwise.
    """
    update, owner = update_of(gm), roots(gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    lists = [list(a) for a in update.args[:4]]
    for k, (parameter, gradient) in enumerate(zip(lists[0], lists[1], strict=True)):
        readers = [n for n in order if n.op == "call_function" and n is not update
                   and any(owner[r] is parameter for r in n.all_input_nodes) and owner[n] is not parameter]
        last = max(readers, key=order.__getitem__, default=None)
        if last is not None and order[gradient] < min(map(order.__getitem__, last.users)):
            _update_early(gm, lists, k, last)
            return
    raise AssertionError("no parameter can be read behind its gradient")


def lays_out_a_gradient_otherwise(gm: GraphModule) -> None:
    """The first square matrix's gradient has the same elements in the memory order of its transpose."""
    update = update_of(gm)
    gradients = list(update.args[1])
    k = next(k for k, g in enumerate(gradients) if g.meta["val"].dim() == 2)
    node, value = gradients[k], gradients[k].meta["val"]
    with gm.graph.inserting_before(update):
        for target, options in ((torch.ops.aten.t.default, {}),
                                (torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}),
                                (torch.ops.aten.t.default, {})):
            node = gm.graph.call_function(target, (node,), options)
            value = node.meta["val"] = target(value, **options)
    gradients[k] = node
    update.args = (update.args[0], gradients, *update.args[2:])


def forgets_a_parameter(gm: GraphModule) -> None:
    update = update_of(gm)
    lists = [list(a)[1:] for a in update.args[:4]]
    update.args = (*lists, [], update.args[5][1:], *update.args[6:])


def leaves_out_the_other_ranks_norm(gm: GraphModule) -> None:
    starts = gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)
    start = starts[-1]
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)


def _update_early(gm: GraphModule, lists: list[list[Node]], k: int, last: Node) -> None:
    update, gradient = update_of(gm), lists[1][k]
    (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor)
    with gm.graph.inserting_after(gradient):
        early = gm.graph.call_function(update.target, (*([a[k]] for a in lists), [], update.args[5][:1]),
                                       dict(update.kwargs))
    early.prepend(add)
    early.append(last)
    for each in lists:
        del each[k]
    update.args = (*lists, [], update.args[5][1:], *update.args[6:])


FAULTS = (leaves_a_gradient_out_of_the_norm, forgets_the_step_count, swaps_two_gradients, lays_out_a_gradient_otherwise,
          forgets_a_parameter, updates_before_the_last_read)
"""Those that change the values on one rank too."""
