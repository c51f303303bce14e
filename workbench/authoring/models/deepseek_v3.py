"""DeepSeek-V3 as plain modules with the loss inside; only the experts' dispatch knows about meshes.

The architecture is that of arXiv:2412.19437: latent attention, the first layers dense, then mixtures of experts.
Rotary pairs are (i, i + width / 2). Left out: YaRN, which extends the context beyond training, and the second
prediction head.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from workbench.authoring.models.attention import ATTENTION, BlockMask
from workbench.authoring.models.decoder import Decoder, DecoderBlock, DecoderConfig
from workbench.authoring.models.layers import FeedForward, RMSNorm, apply_rope
from workbench.authoring.models.moe import MoE, MoEConfig
from workbench.torch_api.inductor.regions import region


@dataclass(frozen=True)
class DeepSeekV3Config(MoEConfig, DecoderConfig):
    """Sizes. A head's query and key have qk_nope_dim + qk_rope_dim channels, its value v_dim.

    q_lora_rank 0: queries are projected from the hidden state. The first n_dense_layers have no experts.
    """

    n_layers: int = 3
    n_dense_layers: int = 1
    n_heads: int = 4
    q_lora_rank: int = 0
    kv_lora_rank: int = 64
    qk_nope_dim: int = 32
    qk_rope_dim: int = 16
    v_dim: int = 32
    norm_eps: float = 1e-6
    max_seq_len: int = 4096


class LatentAttention(nn.Module):
    """Multi-head latent attention: one narrow vector for each token yields the keys and values of all heads.

    Rotary embeddings rotate qk_rope_dim further channels, whose key all heads share. The number of heads comes from the
    inputs' shapes, so a rank may hold some of them.
    """

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        self.config = config
        self.kernel = ATTENTION[config.attention]
        self.named = region if config.attention == "flex" else nullcontext
        width = config.n_heads * (config.qk_nope_dim + config.qk_rope_dim)
        if config.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(config.q_lora_rank, config.norm_eps)
        self.wq = nn.Linear(config.q_lora_rank or config.dim, width, bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_lora_rank + config.qk_rope_dim, bias=False)
        self.kv_norm = RMSNorm(config.kv_lora_rank, config.norm_eps)
        # a hook for tensor parallelism, which gathers the key of all positions here
        self.rope_key = nn.Identity()
        self.wkv = nn.Linear(
            config.kv_lora_rank, config.n_heads * (config.qk_nope_dim + config.v_dim), bias=False
        )
        self.wo = nn.Linear(config.n_heads * config.v_dim, config.dim, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: BlockMask | None = None
    ) -> torch.Tensor:
        """x (batch, seq, dim) -> (batch, seq, dim)."""
        nope, turned, value = self.config.qk_nope_dim, self.config.qk_rope_dim, self.config.v_dim
        # before torch 2.13 a linear layer does not take a DTensor that is cut on dim 1
        rows = x.flatten(0, 1)
        narrow = (
            self.q_norm(self.wq_a(rows).unflatten(0, x.shape[:2])) if self.config.q_lora_rank else x
        )
        q = self.wq(narrow).unflatten(-1, (-1, nope + turned))
        latent, key = (
            self.wkv_a(rows).unflatten(0, x.shape[:2]).split((self.config.kv_lora_rank, turned), -1)
        )
        k, v = (
            self.wkv(self.kv_norm(latent))
            .unflatten(-1, (-1, nope + value))
            .split((nope, value), -1)
        )
        key = apply_rope(self.rope_key(key).unsqueeze(2), cos, sin).expand(-1, -1, q.shape[2], -1)
        q = torch.cat((q[..., :nope], apply_rope(q[..., nope:], cos, sin)), -1)
        with self.named("flex_attention"):
            y = self.kernel(
                q.transpose(1, 2), torch.cat((k, key), -1).transpose(1, 2), v.transpose(1, 2), mask
            )
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(DecoderBlock):
    """One layer: with a dense feed-forward, or with a mixture of experts."""

    def __init__(self, config: DeepSeekV3Config, dense: bool) -> None:
        super().__init__()
        self.attention = LatentAttention(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        if dense:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        else:
            self.moe = MoE(config)
        self.dense = dense

    def mixed(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """The residual and its norm -> the block's output."""
        return super().mixed(x, normed) if self.dense else x + self.moe(normed)


class DeepSeekV3(Decoder):
    """The whole model."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        blocks = (Block(config, index < config.n_dense_layers) for index in range(config.n_layers))
        super().__init__(config, blocks, config.qk_rope_dim)
