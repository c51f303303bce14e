"""DeepSeek-V3 as plain modules, with the loss inside: nothing here knows about meshes but the experts' dispatch.

The architecture is that of arXiv:2412.19437: latent attention, the first layers dense, then mixtures of experts.
Rotary pairs are (i, i + width / 2). Left out: YaRN, which serves longer contexts than it was trained on, and the
second prediction head.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from workbench.models.attention import ATTENTION, BlockMask, block_mask
from workbench.models.layers import FeedForward, RMSNorm, apply_rope, rope_table
from workbench.models.loss import CrossEntropy
from workbench.models.moe import MoE, MoEConfig
from workbench.sizes import SIZES
from workbench.torch_api.regions import region


@dataclass(frozen=True)
class DeepSeekV3Config(MoEConfig):
    """Sizes. A head's query and key have qk_nope_dim + qk_rope_dim channels, its value v_dim.

    q_lora_rank 0: queries come straight from the hidden state. The first n_dense_layers have no experts.
    """

    n_layers: int = 3
    n_dense_layers: int = 1
    n_heads: int = 4
    vocab_size: int = 256
    ffn_dim: int = 384
    q_lora_rank: int = 0
    kv_lora_rank: int = 64
    qk_nope_dim: int = 32
    qk_rope_dim: int = 16
    v_dim: int = 32
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_seq_len: int = 4096
    attention: str = "sdpa"
    mask: str = "causal"
    document_token: int = 0


FLAVORS: dict[str, DeepSeekV3Config] = {
    flavor: DeepSeekV3Config(**sizes)  # type: ignore[arg-type]  # sizes are of the right type by name
    for flavor, sizes in SIZES["deepseek_v3"].items()
}


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads come from one narrow vector a token.

    Positions turn qk_rope_dim channels beside it, whose key all heads share. Counts heads from what it gets.
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
        self.rope_key = nn.Identity()  # where tensor parallelism brings the key of all positions to all heads
        self.wkv = nn.Linear(config.kv_lora_rank, config.n_heads * (config.qk_nope_dim + config.v_dim), bias=False)
        self.wo = nn.Linear(config.n_heads * config.v_dim, config.dim, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: BlockMask | None = None
    ) -> torch.Tensor:
        """x (batch, seq, dim) -> (batch, seq, dim)."""
        nope, turned, value = self.config.qk_nope_dim, self.config.qk_rope_dim, self.config.v_dim
        rows = x.flatten(0, 1)  # before torch 2.13 a linear layer does not take a DTensor that is cut on dim 1
        narrow = self.q_norm(self.wq_a(rows).unflatten(0, x.shape[:2])) if self.config.q_lora_rank else x
        q = self.wq(narrow).unflatten(-1, (-1, nope + turned))
        latent, key = self.wkv_a(rows).unflatten(0, x.shape[:2]).split((self.config.kv_lora_rank, turned), -1)
        k, v = self.wkv(self.kv_norm(latent)).unflatten(-1, (-1, nope + value)).split((nope, value), -1)
        key = apply_rope(self.rope_key(key).unsqueeze(2), cos, sin).expand(-1, -1, q.shape[2], -1)
        q = torch.cat((q[..., :nope], apply_rope(q[..., nope:], cos, sin)), -1)
        with self.named("flex_attention"):
            y = self.kernel(q.transpose(1, 2), torch.cat((k, key), -1).transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a dense feed-forward or a mixture of experts, each with its norm and its residual."""

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

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: BlockMask | None = None
    ) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        with region("norm"):
            normed = self.attention_norm(x)
        x = x + self.attention(normed, cos, sin, mask=mask)
        with region("norm"):
            normed = self.ffn_norm(x)
        if not self.dense:
            return x + self.moe(normed)
        with region("feed_forward"):
            return x + self.feed_forward(normed)


class DeepSeekV3(nn.Module):
    """The whole model. `forward(tokens, targets)` gives the mean cross entropy, so a captured graph returns a scalar.

    Build it under `torch.device("meta")` for large flavors; `reset_buffers` then computes the rotary table.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, index < config.n_dense_layers) for index in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss = CrossEntropy()
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the rotary table on `device`, after a build on the meta device."""
        config = self.config
        cos, sin = rope_table(config.qk_rope_dim, config.max_seq_len, config.rope_theta, device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets (batch, seq) int64 -> mean cross entropy, a scalar in float32 (float64 stays)."""
        config, seq = self.config, tokens.shape[1]
        mask = block_mask(config.mask, tokens, config.document_token) if config.attention == "flex" else None
        x = self.tok_embeddings(tokens)
        cos, sin = self.rope_cos[:seq].to(x.dtype), self.rope_sin[:seq].to(x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, mask)
        return self.loss(self.output(self.norm(x)), targets)
