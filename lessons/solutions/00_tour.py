"""Answers to the checkpoints of 00_tour; kept apart from the notebook."""

from collections.abc import Callable
from typing import Any


def save_less() -> dict[str, Any]:
    """Selective saves the reduce-scatters, so none is launched again; of a layer's products it then saves fewer."""
    return {"policy": "selective", "every_nth_matmul": 100}


def unnoticed() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Each matrix gets twice its gradient. AdamW divides a gradient by its own size, so it takes the same steps."""
    return (lambda g, x: g.t() @ x), (lambda g, x: 2 * (g.t() @ x))
