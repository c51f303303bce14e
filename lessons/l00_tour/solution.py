"""Answers to the checkpoints of 00_tour; kept apart from the notebook."""

from collections.abc import Callable
from typing import Any

import torch


def save_less() -> dict[str, Any]:
    """Of seven matmuls only the fourth is kept: `wo`, whose sum is kept anyway. So 7 and all from 8 are right, too."""
    return {"policy": "selective", "every_nth_matmul": 4}


def unnoticed() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Row i gets i + 1 times its gradient. AdamW divides each element by its own size, so it takes the same steps."""

    def gradient(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        right = g.t() @ x
        return right * torch.ones_like(right).cumsum(0)

    return gradient
