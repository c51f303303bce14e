"""What "Route tokens to experts" grades: bytes told as slots of each expert."""

from __future__ import annotations

import math
from typing import Any

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
