"""Llama 3 as plain modules with the loss inside, without any knowledge of meshes.

The architecture is that of arXiv:2407.21783: RMSNorm before each block, rotary positions, grouped-query attention,
SwiGLU. Rotary pairs are (i, i + head_dim / 2), as in Hugging Face's port of the weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from workbench.authoring.models.attention import ATTENTION, BlockMask
from workbench.authoring.models.decoder import Decoder, DecoderBlock, DecoderConfig
from workbench.authoring.models.layers import FeedForward, RMSNorm, apply_rope
from workbench.torch_api.inductor.regions import region


@dataclass(frozen=True)
class Llama3Config(DecoderConfig):
    """Sizes. head_dim is dim / n_heads; each of n_kv_heads serves n_heads / n_kv_heads query heads."""

    n_kv_heads: int = 4
    rope_theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


class Attention(nn.Module):
    """Causal grouped-query attention. Head counts come from the inputs' shapes: a rank may hold some heads."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kernel = ATTENTION[config.attention]
        # sdpa has its own kernel; flex attention needs the compiler, so a region marks it
        self.named = region if config.attention == "flex" else nullcontext
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: BlockMask | None = None
    ) -> torch.Tensor:
        """x (batch, seq, dim) -> (batch, seq, dim)."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        with self.named("flex_attention"):
            y = self.kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(DecoderBlock):
    """One layer of Llama 3."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)


class Llama3(Decoder):
    """The whole model."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__(config, (Block(config) for _ in range(config.n_layers)), config.head_dim)
