"""Shared parts of decoder-only language models: blocks around a residual stream, embedding, output and loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from workbench.authoring.models.attention import BlockMask
from workbench.authoring.models.layers import RMSNorm, rope_table
from workbench.authoring.models.loss import CrossEntropy
from workbench.torch_api.flex import block_mask
from workbench.torch_api.inductor.regions import region


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes that every family has."""

    dim: int = 128
    n_layers: int = 4
    n_heads: int = 8
    vocab_size: int = 256
    ffn_dim: int = 384
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_seq_len: int = 2048
    attention: str = "sdpa"
    mask: str = "causal"
    document_token: int = 0


class DecoderBlock(nn.Module):
    """`attention`, then `feed_forward`, each after a norm and inside a residual connection.

    A family's block creates these four modules, and may override `mixed`.
    """

    attention: nn.Module
    feed_forward: nn.Module
    attention_norm: RMSNorm
    ffn_norm: RMSNorm

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: BlockMask | None = None
    ) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        with region("norm"):
            normed = self.attention_norm(x)
        x = x + self.attention(normed, cos, sin, mask=mask)
        with region("norm"):
            normed = self.ffn_norm(x)
        return self.mixed(x, normed)

    def mixed(self, x: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """The residual and its norm -> the block's output."""
        with region("feed_forward"):
            return x + self.feed_forward(normed)


class Decoder(nn.Module):
    """The whole model. `forward(tokens, targets)` returns the mean cross entropy, so a captured graph returns a scalar.

    Build large flavors under `torch.device("meta")`; `reset_buffers` then computes the rotary table, which rotates
    `rope_width` channels of a head.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(
        self, config: DecoderConfig, blocks: Iterable[DecoderBlock], rope_width: int
    ) -> None:
        super().__init__()
        self.config, self.rope_width = config, rope_width
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss = CrossEntropy()
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the rotary table on `device`, after a build on the meta device."""
        cos, sin = rope_table(
            self.rope_width, self.config.max_seq_len, self.config.rope_theta, device
        )
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets (batch, seq) int64 -> mean cross entropy, a scalar in float32 (float64 stays)."""
        config, seq, mask = self.config, tokens.shape[1], None
        if config.attention == "flex":
            mask = block_mask(tokens, config.document_token if config.mask == "document" else None)
        x = self.tok_embeddings(tokens)
        cos, sin = self.rope_cos[:seq].to(x.dtype), self.rope_sin[:seq].to(x.dtype)
        for block in self.layers:
            x = block(x, cos, sin, mask)
        return self.loss(self.output(self.norm(x)), targets)
