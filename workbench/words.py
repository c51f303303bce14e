"""How the package says how many, and what went wrong."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 launch`, `2 launches`, `1,024 ranks`."""
    more = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{more * (count != 1)}"


def first_line(error: BaseException) -> str:
    """What an error says, up to its first line break; its kind where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
