"""Attention kernels that a model can choose by name. They get local tensors, never DTensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention: q (batch, heads, seq, head_dim), k and v (batch, kv_heads, seq, head_dim) -> shape of q.

    Heads must be a multiple of kv_heads: each kv head serves that many query heads (grouped queries).
    """
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


ATTENTION: dict[str, Attention] = {"sdpa": sdpa}
