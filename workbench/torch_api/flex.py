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


def causal_mask(seq: int, device: torch.device) -> BlockMask:
    """Each position attends to itself and the positions before it."""

    def visible(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return q >= kv

    blocks = -(-seq // BLOCK)
    order = torch.arange(blocks, dtype=torch.int32, device=device)
    indices = order.expand(1, 1, blocks, blocks)
    whole = order.expand(1, 1, blocks)  # row i attends to i whole blocks and to a part of block i
    diagonal = order[:, None].expand(1, 1, blocks, blocks)
    # GPU kernels assume contiguous lists
    return BlockMask.from_kv_blocks(torch.ones_like(whole), diagonal.contiguous(), whole.contiguous(),
                                    indices.contiguous(), BLOCK, visible, (seq, seq))


def document_mask(tokens: torch.Tensor, end: int) -> BlockMask:
    """Causal within each document. A document ends with the token `end`. tokens: (batch, seq) int64."""
    ends = (tokens == end).int()
    document = ends.cumsum(1) - ends  # the end token belongs to its document

    def visible(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return (q >= kv) & (document[b, q] == document[b, kv])

    seq = tokens.shape[1]
    blocks = -(-seq // BLOCK)
    order = torch.arange(blocks, device=tokens.device)
    first = document[:, order * BLOCK]
    last = document[:, (order * BLOCK + BLOCK - 1).clamp(max=seq - 1)]
    before, same = order[:, None] > order, order[:, None] == order
    some = (before | same) & (last[:, None, :] >= first[:, :, None])
    whole = before & (first[:, None, :] == last[:, :, None])

    def listed(which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = which.unsqueeze(1).int()
        return chosen.sum(-1, dtype=torch.int32), chosen.argsort(
            dim=-1, descending=True, stable=True
        ).int()

    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK, visible, (seq, seq)
    )
