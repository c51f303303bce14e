"""Small modules that several tests train."""

import torch
from torch import nn


class Block(nn.Module):
    """(rows, 8) -> (rows, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Summed(nn.Sequential):
    """Its loss is the sum of what the last module gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()
