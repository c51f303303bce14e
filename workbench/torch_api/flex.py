"""FlexAttention and its block masks, and its backward on a CPU, which torch refuses.

Source: torch/nn/attention/flex_attention.py (`flex_attention`, `BlockMask`, and `_validate_device`, which refuses a
backward on a CPU). Eager and traced graphs run that backward; only Inductor has no lowering for it there.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex

BlockMask = flex.BlockMask
BLOCK = 128


@contextlib.contextmanager
def cpu_backward() -> Iterator[None]:
    """Inside, FlexAttention can be traced and run eagerly on CPU tensors that require gradients."""
    with mock.patch.object(flex, "_validate_device", lambda *_: None):
        yield


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
) -> torch.Tensor:
    """Attention under a block mask: q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim)."""
    grouped = q.shape[1] != k.shape[1]
    if torch.compiler.is_compiling():  # inside a capture, which allows the backward
        return flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    with cpu_backward(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)


def block_mask(tokens: torch.Tensor, end: int | None = None) -> BlockMask:
    """Each position attends to itself and those before it; with a token `end` only within a document that it ends.

    tokens: (batch, seq) int64.
    """
    seq = tokens.shape[1]
    order = torch.arange(-(-seq // BLOCK), device=tokens.device)
    whole, some = order[None, :, None] > order, order[None, :, None] >= order

    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return q >= kv

    visible = causal
    if end is not None:
        ends = (tokens == end).int()
        document = ends.cumsum(1) - ends  # the end token belongs to its document
        first = document[:, order * BLOCK]
        last = document[:, (order * BLOCK + BLOCK - 1).clamp(max=seq - 1)]
        some = some & (last[:, None, :] >= first[:, :, None])
        whole = whole & (first[:, None, :] == last[:, :, None])

        def within(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            return (q >= kv) & (document[b, q] == document[b, kv])

        visible = within

    def listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = blocks.unsqueeze(1).int()
        indices = chosen.argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32), indices.int()

    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK, visible, (seq, seq)
    )
