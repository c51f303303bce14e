"""graph_cleanup: leave out views that change nothing, transposes that undo each other, and dead code.

Each of them costs microseconds on the host where a graph runs node by node.

    >>> example("graph_cleanup", lambda x, weight: x.t().t() @ weight)
    before:
      ...
      t: float32 [4, 4] = aten.t(primals_2)  # layers.0
      t_1: float32 [4, 4] = aten.t(t)  # layers.0
      mm: float32 [4, 4] = aten.mm(t_1, primals_1)  # layers.0
      ...
    after:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      ...
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.ops import op_name

_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape"})
_TURNS = frozenset({"aten.t", "aten.transpose", "aten.permute"})
_NAMES = frozenset({"aten.alias", "aten.detach"})


def fewer_nodes(before: Graphs, after: Graphs, options: Options) -> Effect:
    """Fewer operators of some kind than before, over forward and backward."""
    was, now = (
        Counter(op_name(n.target) for g in graphs for n in g.graph.nodes if n.op == "call_function")
        for graphs in (before, after)
    )
    gone = dict(was - now)
    return Effect(bool(gone), "" if gone else "no view and no transpose is idle", {"removed": gone})


def _alike(a: Any, b: Any) -> bool:
    """The same shape, strides, offset and dtype: over the same storage, the same tensor."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.ndim == b.ndim):
        return False
    numbers = zip((*a.shape, *a.stride(), a.storage_offset()), (*b.shape, *b.stride(), b.storage_offset()), strict=True)
    # some sizes are known only when the step runs
    return all(statically_known_true(x == y) for x, y in numbers)


def _source(node: Node) -> Node | None:
    """The node that can be read in place of this one, or None."""
    name, operand = op_name(node.target), node.args[0] if node.args else None
    if not isinstance(operand, Node):
        return None
    value = node.meta.get("val")
    if name in _NAMES or (name in _VIEWS | _TURNS and _alike(value, operand.meta.get("val"))):
        return operand
    if name in _TURNS and op_name(operand.target) in _TURNS:
        base = operand.args[0]
        return base if isinstance(base, Node) and _alike(value, base.meta.get("val")) else None
    return None


def _base(node: Node) -> Node | None:
    """Behind a view of a view: the tensor that both are views of, if it is contiguous."""
    operand = node.args[0]
    if not _reshapes(node) or not isinstance(operand, Node) or not _reshapes(operand):
        return None
    base = operand.args[0]
    value = base.meta.get("val") if isinstance(base, Node) else None
    plain = isinstance(value, torch.Tensor) and value.is_contiguous() and node.meta["val"].is_contiguous()
    return base if plain and isinstance(base, Node) else None


def _reshapes(node: Node) -> bool:
    """Whether the node gives its input another shape; aten.view also has a form that gives another dtype."""
    return op_name(node.target) in _VIEWS and not isinstance(node.args[1], torch.dtype)


@register_pass(
    "graph_cleanup", stage="partitioned", numerics="exact",
    changes="no view that changes nothing, no transposes that undo each other, no dead code",
    after={"autobucketing_reordering", "transformer_block_bucketing", "overlap_collectives"},
    effect=fewer_nodes, source="workbench",
)
def graph_cleanup(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """Bypass idle nodes, then remove dead code. Outputs of the graph stay, and so does every operator that writes."""
    output = gm.graph.output_node()
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        while (base := _base(node)) is not None:
            node.replace_input_with(node.args[0], base)  # type: ignore[arg-type]
        if (source := _source(node)) is not None:
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user is not output)
    gm.graph.eliminate_dead_code()
    return gm
