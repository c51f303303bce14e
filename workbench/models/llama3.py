"""Llama 3 as plain modules, with the loss inside: nothing here knows about meshes.

The architecture is that of arXiv:2407.21783: RMSNorm before each block, rotary positions, grouped-query attention,
SwiGLU. Rotary pairs are (i, i + head_dim / 2), as in Hugging Face's port of the weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from workbench.models.attention import ATTENTION, BlockMask, block_mask
from workbench.models.layers import FeedForward, RMSNorm, apply_rope, rope_table
from workbench.models.loss import CrossEntropy
from workbench.sizes import SIZES
from workbench.torch_api.regions import region


@dataclass(frozen=True)
class Llama3Config:
    """Sizes. head_dim is dim / n_heads; each of n_kv_heads serves n_heads / n_kv_heads query heads."""

    dim: int = 128
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    vocab_size: int = 256
    ffn_dim: int = 384
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    max_seq_len: int = 2048
    attention: str = "sdpa"
    mask: str = "causal"
    document_token: int = 0

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


FLAVORS: dict[str, Llama3Config] = {
    flavor: Llama3Config(**sizes)  # type: ignore[arg-type]  # sizes are int or float by name
    for flavor, sizes in SIZES["llama3"].items()
}


class Attention(nn.Module):
    """Causal grouped-query attention. Counts heads from what it gets, so a rank may hold some of them."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.kernel = ATTENTION[config.attention]
        # a kernel of its own needs no compiler; what is written as a formula does
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


class Block(nn.Module):
    """Attention, then feed-forward, each with its norm before and its residual around."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: BlockMask | None = None
    ) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        with region("norm"):
            normed = self.attention_norm(x)
        x = x + self.attention(normed, cos, sin, mask=mask)
        with region("norm"):
            normed = self.ffn_norm(x)
        with region("feed_forward"):
            return x + self.feed_forward(normed)


class Llama3(nn.Module):
    """The whole model. `forward(tokens, targets)` gives the mean cross entropy, so a captured graph returns a scalar.

    Build it under `torch.device("meta")` for large flavors; `reset_buffers` then computes the rotary table.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss = CrossEntropy()
        cos, sin = self._rope()
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the rotary table on `device`, after a build on the meta device."""
        self.rope_cos, self.rope_sin = self._rope(device)

    def _rope(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        return rope_table(config.head_dim, config.max_seq_len, config.rope_theta, device)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets (batch, seq) int64 -> mean cross entropy, a scalar in float32 (float64 stays)."""
        seq = tokens.shape[1]
        cos, sin = self.rope_cos[:seq], self.rope_sin[:seq]
        flex = self.config.attention == "flex"
        mask = block_mask(self.config.mask, tokens, self.config.document_token) if flex else None
        x = self.tok_embeddings(tokens)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, mask)
        return self.loss(self.output(self.norm(x)), targets)
