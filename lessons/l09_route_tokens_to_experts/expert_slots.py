"""What "Route tokens to experts" grades: bytes told as slots of each expert, and experts chosen from two groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from workbench.authoring.models.moe import best_experts
from workbench_lessons.course.grading import exact


def slot_bytes(answer: Any, *, rows: int, size: int, experts: int) -> tuple[float, str]:
    """Asks for the `size` in bytes of an exchange of `rows` slots. The message tells a wrong number in slots."""
    score, message = exact(answer, truth=size)
    if not message.startswith("too "):
        return score, message
    number = float(answer.replace(",", "") if isinstance(answer, str) else answer)
    slots = number / (size // rows) / experts
    if not math.isfinite(slots):
        return score, message
    said = f"that is {slots:,.2f} slots".replace(".00 ", " ") + f" for each of the {experts} experts"
    if slots != int(slots):
        return score, f"{said}: not a whole number"
    return score, f"{said}: too {'few' if slots * experts < rows else 'many'}"


def wrong_choices(choose: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, int]:
    """How many of 64 tokens `choose`, (tokens, 16) -> (tokens, 4), sends where the rule of two groups does not."""
    scores = torch.rand(64, 16, generator=torch.Generator().manual_seed(1))
    rows, right = choose(scores).tolist(), best_experts(scores, 4, n_groups=4, top_groups=2).tolist()
    groups = [len({expert // 4 for expert in row}) for row in rows]
    other = [sorted(row) != sorted(wanted) for row, wanted in zip(rows, right, strict=True)]
    order = [row != wanted for row, wanted in zip(rows, right, strict=True)]
    return {"tokens that reach too many groups": sum(count > 2 for count in groups),
            "tokens with other experts": sum(other), "tokens with another order": sum(order) - sum(other)}
