"""causal_attention: an attention whose mask is the causal one is called with is_causal and without the mask.

A model that is captured whole computes its mask from positions (transformers does), and a tensor as mask excludes the
fast kernels: each row then computes every column and reads the mask, forward and backward.

    >>> example("causal_attention", lambda x, weight: torch.nn.functional.scaled_dot_product_attention(
    ...     *[(x @ weight).view(1, 1, 4, 4)] * 3, attn_mask=torch.arange(4)[:, None] >= torch.arange(4)))
    before:
      ...
      ge: bool [4, 4] = aten.ge.Tensor(unsqueeze, arange)  # layers.0
      ...
      where: float32 [4, 4] = aten.where.self(ge, scalar_tensor_1, scalar_tensor)  # layers.0
      _scaled_dot_product_flash_attention_for_cpu: ...(view, view, view, attn_mask=where)  # layers.0
      ...
      return (sum_1, view, where, getitem_1, detach_1, t)
    after:
      ...
      view: float32 [1, 1, 4, 4] = aten.view(mm, [1, 1, 4, 4])  # layers.0
      _scaled_dot_product_flash_attention_for_cpu_1: ...(view, view, view, 0.0, True)  # layers.0
      ...
      return (sum_1, view, getitem_6, detach_3, t)

The pass works on the joint graph, where every capture and `as_backend` meet. There the mask has already chosen the
kernel, and the backward reads what that kernel saved. So both are replaced together: `scaled_dot_product_attention` is
traced with its backward on the same fake values, and torch chooses the kernel again. (In the graph that Dynamo hands to
AOTAutograd the mask is one argument, but a traced capture has no such graph, and no check compares one.)

A mask is causal if it follows from constants alone, and each of its elements is the causal one's: it is evaluated on
the CPU, a large one in blocks of rows. Every other attention stays. Numerics compares the values of both graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter, getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.nn.functional import scaled_dot_product_attention

from workbench.graph.facts import reading
from workbench.graph.make_nodes import fake_mode_of, origin_of, refresh_views
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.distributed.fake import unset_fake_temporarily
from workbench.torch_api.ops import argument, calls_of, hint, is_fake, is_symbolic, may_be_random, op_name, short_name

WHOLE = 1 << 22
"""Elements of a constant that is evaluated whole, and of a block of rows of a larger one."""
LOWEST = -65504.0
"""What excludes a column: the exponential of it is zero in any dtype. cuDNN's attention adds it for a boolean mask."""
_FILLS = {f"{new}{fill}" for new in ("", "new_") for fill in ("full", "ones", "zeros")}
_VIEWS = {"view", "_unsafe_view", "unsqueeze", "squeeze", "alias", "detach"}
_BY_ROWS = _FILLS | {"full_like", "clone", "_to_copy", "convert_element_type", "masked_fill"}


class NotCausal(Exception):
    """Why an attention stays as it is."""


class Constants:
    """Values of nodes that follow from constants alone, on the CPU: whole, or some rows (dimension -2)."""

    def __init__(self) -> None:
        self.values: dict[Node, Any] = {}

    def whole(self, node: Node) -> Any:
        """Raises NotCausal where the node depends on an input of the graph, or on random numbers."""
        if node not in self.values:
            value = None
            if node.op == "get_attr":
                value = attrgetter(str(node.target))(node.graph.owning_module)
            elif node.op == "call_function" and not may_be_random(node.target):
                value = _run(node, self.whole, node.meta["val"])
            if value is None or is_fake(value):
                raise NotCausal(f"the mask is computed from {node.name}, which is no constant")
            self.values[node] = value
        return self.values[node]

    def rows(self, node: Any, start: int, stop: int) -> Any:
        """Rows `start` to `stop` of a node; of one with a single row, which is broadcast, that row."""
        value, name = node.meta["val"], short_name(node)
        if value.ndim < 2 or value.shape[-2] == 1:
            return self.whole(node)
        if value.numel() <= WHOLE or node.op != "call_function" or may_be_random(node.target):
            return self.whole(node)[..., start:stop, :]

        def operand(source: Node) -> Any:
            return self.rows(source, start, stop)

        block = value[..., start:stop, :]
        if name == "expand":
            return operand(node.args[0]).expand(block.shape)
        if name in _VIEWS and node.args[0].meta["val"].shape[-2:] == value.shape[-2:]:
            return operand(node.args[0]).reshape(block.shape)
        if name in ("tril", "triu"):
            diagonal = argument(node, "diagonal") or 0
            return node.target(operand(node.args[0]), diagonal + start)
        pads = name == "constant_pad_nd" and len(node.args[1]) == 2
        cuts = name == "slice" and node.args[1] in (-1, value.ndim - 1)
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if pads or cuts or pointwise or name in _BY_ROWS:
            return _run(node, operand, block)
        raise NotCausal(f"the mask is computed by {name}, which is not evaluated in blocks of rows")


def _run(node: Any, value_of: Callable[[Node], Any], like: Any) -> Any:
    """The node's result on the CPU. value_of: what it reads; like: a fake tensor of the result's shape."""
    if (name := short_name(node).removesuffix("_like")) in _FILLS:
        fill = 1 if "ones" in name else 0 if "zeros" in name else node.args[-1]
        return torch.full(like.shape, fill, dtype=like.dtype)

    def argument_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return value_of(leaf) if isinstance(leaf, Node) else leaf

    args, kwargs = map_aggregate((node.args, node.kwargs), argument_of)  # type: ignore[misc]
    return node.target(*args, **kwargs)


def _require_causal(node: Any, constants: Constants) -> None:
    """Raise NotCausal where an attention is to stay: its mask has another element than the causal one, for example."""
    mask = _mask_of(node)
    if mask is None:
        raise NotCausal("is_causal is set" if argument(node, "is_causal") else "there is no mask")
    query, key, value = (item.meta["val"] for item in (*node.args[:2], mask))
    length, keys = query.shape[-2], key.shape[-2]
    if any(map(is_symbolic, (query, key, value))):
        raise NotCausal("sizes are known only in a step")
    if length != keys or value.shape[-2:] != (length, keys):
        raise NotCausal(f"there are {length} queries, {keys} keys and a mask {list(value.shape)}")
    if argument(node, "dropout_p"):
        raise NotCausal("it draws random numbers, and another kernel draws others")
    step = max(1, WHOLE * length // value.numel())
    for start in range(0, length, step):
        stop = min(start + step, length)
        rows = constants.rows(mask, start, stop)
        if rows.dtype == torch.bool:
            rows = rows.float().log()
        past = torch.arange(length) <= torch.arange(start, stop)[:, None]
        wrong = torch.where(past, rows != 0, ~(rows <= LOWEST)).nonzero().tolist()
        if wrong:
            *batch, row, column = wrong[0]
            added = float(rows[*batch, row, column])
            raise NotCausal(f"the mask adds {added:.3g} in row {row + start}, column {column}")


def _mask_of(node: Node) -> Any:
    """What an attention adds to its scores, before it is expanded over batch and heads; None without one."""
    mask = argument(node, "attn_mask") or argument(node, "attn_bias")
    while mask is not None and short_name(mask) == "expand":
        if mask.args[0].meta["val"].shape[-2:] != mask.meta["val"].shape[-2:]:
            break
        mask = mask.args[0]
    return mask


def _calls(gm: GraphModule) -> dict[Node, Node | None]:
    """Each fused attention, and its backward."""
    calls: dict[Node, Node | None] = {}
    for node in calls_of(gm.graph, lambda t: op_name(t).startswith("aten._scaled_dot_product_")):
        if short_name(node).endswith("_backward"):
            source = argument(node, "logsumexp")
            while source not in calls:
                source = source.all_input_nodes[0]
            calls[source] = node
        else:
            calls[node] = None
    return calls


def _reasons(gm: GraphModule) -> dict[Node, str]:
    """Why each attention is to stay; "" where its mask is causal."""
    constants, reasons = Constants(), {}
    for node in _calls(gm):
        reasons[node] = ""
        try:
            with unset_fake_temporarily():
                _require_causal(node, constants)
        except NotCausal as reason:
            reasons[node] = str(reason)
    return reasons


def _figures(gm: GraphModule) -> dict[str, Any]:
    """FLOP: two matmuls forward, and five backward, which computes the scores again; half of each if causal."""
    calls, flop = _calls(gm), 0
    masks = [mask for mask in map(_mask_of, calls) if mask is not None]
    for node, backward in calls.items():
        query, key = (item.meta["val"] for item in node.args[:2])  # type: ignore[union-attr]
        matmuls = 7 if backward else 2
        computed = 1 if argument(node, "is_causal") else 2
        flop += matmuls * computed * hint(query.numel() * key.shape[-2])
    size = sum(hint(mask.meta["val"].nbytes) for mask in set(masks))
    return {"masked": len(masks), "mask_bytes": size, "flop": flop, "kernels": ", ".join({*map(short_name, calls)})}


def fewer_masks(before: Graphs, after: Graphs, options: Options) -> Effect:
    """Fewer attentions have a mask than before. The evidence: bytes of the masks, and FLOP of all attentions."""
    was, now = _figures(before[0]), _figures(after[0])
    reasons = reading(_reasons, before[0])
    left = Counter(filter(None, reasons.values()))
    sentences = [f"{count} of {len(reasons)} attentions: {reason}" for reason, count in left.items()]
    if not reasons:
        sentences = ["the graph has no fused attention"]
    evidence = {name: [was[name], now[name]] for name in was}
    return Effect(now["masked"] < was["masked"], "; ".join(sentences), evidence)


def _like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The value in the layout of another one, which readers may view: kernels write heads before or behind rows."""
    if value.stride() == other.stride():
        return value
    if other.is_contiguous():
        return value.contiguous()
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _replace(gm: GraphModule, forward: Any, backward: Any, mode: Any) -> None:
    """Put causal attention before both, for the readers of their results."""
    sources, replaced = [*forward.args[:3]], [forward.meta["val"][0]]
    if backward is not None:
        sources.append(backward.args[0])
        replaced += backward.meta["val"][:3]

    def attend(query: Any, key: Any, value: Any, *gradient: Any) -> list[Any]:
        grouped = query.shape[1] != key.shape[1]
        scale = argument(forward, "scale")
        results = [scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)]
        if gradient:
            results += torch.autograd.grad(results, (query, key, value), gradient)
        return list(map(_like, results, replaced))

    values = [node.meta["val"].detach().requires_grad_(backward is not None) for node in sources]
    with mode, torch.enable_grad():
        traced = make_fx(attend)(*values).graph
    traced.eliminate_dead_code()
    copies = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    with gm.graph.inserting_before(forward):
        results: Any = gm.graph.graph_copy(traced, copies)
    late = set(sources[3:])  # the gradient, and what depends on it
    for node, copied in copies.items():
        if node.op == "call_function":
            anchor = forward
            if not late.isdisjoint(copied.all_input_nodes):
                late.add(copied)
                anchor = backward
                anchor.prepend(copied)
            copied.meta = origin_of(anchor) | {"val": node.meta["val"]}
    for index, result in enumerate(results):
        old, place = (backward, index - 1) if index else (forward, 0)
        for item in list(old.users):
            if item.target is getitem and item.args[1] == place:
                item.replace_all_uses_with(result)
    refresh_views(gm, set(results))


def _erase_unread(gm: GraphModule, dead: set[Any]) -> None:
    """Erase these nodes, their readers, and what they alone read, as far as nothing else reads it."""
    for node in gm.graph.nodes:
        if not dead.isdisjoint(node.all_input_nodes):
            dead.add(node)
    for node in reversed(list(gm.graph.nodes)):
        if node in dead and not node.users and node.op in ("call_function", "get_attr"):
            dead.update(node.all_input_nodes)
            gm.graph.erase_node(node)


@register_pass(
    "causal_attention", stage="joint", numerics="reduction_order",
    changes="an attention with a causal mask reads no mask, and computes no hidden scores",
    effect=fewer_masks, source="torch.nn.functional.scaled_dot_product_attention",
)
def causal_attention(gm: GraphModule, example_inputs: list[Any], *, options: Options) -> GraphModule:
    """Replace each attention whose mask is causal, and its backward."""
    reasons, mode = _reasons(gm), fake_mode_of(gm)
    causal = {node: backward for node, backward in _calls(gm).items() if not reasons[node]}
    for node, backward in causal.items():
        _replace(gm, node, backward, mode)
    _erase_unread(gm, {*causal, *causal.values()})
    return gm
