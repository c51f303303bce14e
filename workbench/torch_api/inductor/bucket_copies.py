"""Gradients go into their bucket and take its dtype in one copy; torch casts each first and copies it then.

Source: torch/_inductor/fx_passes/bucketing.py (`_pre_bucket_reduce_scatter`, which concatenates parts of one dtype).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from workbench.torch_api.ops import op_name

_CONCATENATES = "bucketing._pre_bucket_reduce_scatter"
_CASTS = ("aten._to_copy", "prims.convert_element_type")


@torch.library.custom_op("workbench::copy_into_bucket", mutates_args=())
def copy_into_bucket(parts: list[torch.Tensor], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """One flat tensor of `dtype`: for each rank, its rows of every part.

    Each row is contiguous at both ends, so that on a GPU one kernel copies many of them.
    """
    rows = [part.reshape(ranks, -1) for part in parts]
    widths = [row.shape[1] for row in rows]
    bucket = torch.empty(ranks, sum(widths), dtype=dtype, device=parts[0].device)
    slots = bucket.split(widths, 1)
    torch._foreach_copy_([slot[rank] for rank in range(ranks) for slot in slots],
                         [row[rank] for rank in range(ranks) for row in rows])
    return bucket.flatten()


@copy_into_bucket.register_fake
def _(parts: list[torch.Tensor], ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return parts[0].new_empty((sum(part.numel() for part in parts),), dtype=dtype)


def fold_casts(graph: Graph) -> int:
    """Buckets of reduce-scatters read what was cast for them alone, and cast it themselves. Returns how many casts."""
    folded = 0
    for node in list(graph.nodes):
        if op_name(node.target) != _CONCATENATES:
            continue
        parts: Any = node.args[0]
        before = [_uncast(part) for part in parts]
        if any(n is None for n in before) or len({n.meta["val"].dtype for n in before if n is not None}) > 1:
            continue
        with graph.inserting_before(node):
            copied = graph.call_function(torch.ops.workbench.copy_into_bucket.default,
                                         (before, node.args[1], node.meta["val"].dtype))
        copied.meta = {k: v for k, v in node.meta.items() if k != "eager_input_vals"}  # of the other's arguments
        node.replace_all_uses_with(copied)
        for old in (node, *parts):
            graph.erase_node(old)
        folded += len(parts)
    return folded


def _uncast(part: Node) -> Node | None:
    """What a node casts and does nothing else to, for one reader; else None."""
    given = part.args[0] if part.args else None
    if op_name(part.target) not in _CASTS or len(part.users) > 1 or not isinstance(given, Node):
        return None
    was, now = given.meta.get("val"), part.meta.get("val")
    if not isinstance(was, torch.Tensor) or not isinstance(now, torch.Tensor):
        return None
    return given if was.device == now.device and not set(part.kwargs) - {"dtype"} else None
