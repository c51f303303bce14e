"""A small block that several tests train."""

import torch
from torch import nn


class Block(nn.Module):
    """(rows, 8) -> (rows, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))
