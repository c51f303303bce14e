"""Answers to the checkpoints of 00_tour; kept apart from the notebook."""

from collections.abc import Callable
from typing import Any


def save_less() -> dict[str, Any]:
    """Of seven products only the fourth is kept: `wo`, whose sum is kept anyway. So 7 and all from 8 are right, too."""
    return {"policy": "selective", "every_nth_matmul": 4}


def unnoticed() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Each matrix gets twice its gradient. AdamW divides a gradient by its own size, so it takes the same steps."""
    return (lambda g, x: g.t() @ x), (lambda g, x: 2 * (g.t() @ x))
