"""What "Route tokens to experts" grades: the bytes of an all-to-all, told as slots of each expert."""

from __future__ import annotations

import math
from typing import Any

from workbench.graph.read.collectives import Collective
from workbench.notebook.lessons.grading import exact


def slot_bytes(answer: Any, *, exchange: Collective, experts: int) -> tuple[float, str]:
    """Asks for the bytes of `exchange`. The message tells how many slots a wrong number gives each of the experts."""
    score, message = exact(answer, truth=exchange.bytes_in)
    if not message.startswith("too "):
        return score, message
    given = float(answer.replace(",", "") if isinstance(answer, str) else answer)
    rows = exchange.shape[0]
    each = given / (exchange.bytes_in // rows) / experts
    if not math.isfinite(each):
        return score, message
    said = f"that is {each:,.2f} slots".replace(".00 ", " ") + f" for each of the {experts} experts"
    if each != int(each):
        return score, f"{said}: not a whole number"
    return score, f"{said}: too {'few' if each * experts < rows else 'many'}"
