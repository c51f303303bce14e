"""Attention kernels and masks that a model chooses by name. They take local tensors, never DTensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from workbench.torch_api.flex import BlockMask, flex_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask | None], torch.Tensor]


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask | None = None
) -> torch.Tensor:
    """Causal attention: q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim) -> shape of q.

    Heads must be a multiple of kv_heads: each kv head serves that many query heads (grouped queries). No mask.
    """
    return scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask | None = None
) -> torch.Tensor:
    """The same shapes, under a block mask."""
    if mask is None:
        raise ValueError("flex attention needs a block mask: see block_mask")
    return flex_attention(q, k, v, mask)


ATTENTION: dict[str, Attention] = {"sdpa": sdpa, "flex": flex}
