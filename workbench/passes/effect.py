"""Whether a pass had its intended effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Effect:
    """`reason` says why nothing happened, as far as the graph tells; `evidence` is plain JSON data.

    `happened` is None where it cannot be known yet, and `reason` says why.
    """

    happened: bool | None
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
