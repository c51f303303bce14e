"""Layers that several model families use."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, of width `dim`."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rope_table(
    width: int, length: int, theta: float, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, and sin with its sign for the first half, each (length, width), float32. Source: arXiv:2104.09864."""
    half = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), theta**-half)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of x (batch, seq, heads, width) by its position's angle; cos, sin (seq, width)."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos.unsqueeze(1), torch.cat((second, first), dim=-1), sin.unsqueeze(1))
