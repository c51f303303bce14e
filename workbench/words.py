"""How the package says how many."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 launch`, `2 launches`, `1,024 ranks`."""
    more = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{more * (count != 1)}"
