"""How messages state counts, errors and JSON data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any


def counted(count: int, noun: str) -> str:
    """`1 launch`, `2 launches`, `1,024 ranks`."""
    more = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{more * (count != 1)}"


def mesh_text(axes: Mapping[str, int]) -> str:
    """`dp_shard 2 x tp 2`; `one rank` for a mesh without axes."""
    return " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "one rank"


def few(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: the first names, and the number of the others."""
    return ", ".join(names[:most]) + (
        f" and {len(names) - most:,} more" if len(names) > most else ""
    )


def differing(before: Iterable[str], after: Iterable[str]) -> str:
    """` (lost a; new b, c)`: the names that one of two lists has more often; "" where both have the same."""
    was, now = Counter(before), Counter(after)
    changes = {"lost": list((was - now).elements()), "new": list((now - was).elements())}
    phrases = [f"{kind} {few(names, 3)}" for kind, names in changes.items() if names]
    return f" ({'; '.join(phrases)})" if phrases else ""


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table. Columns are left-aligned, except those at the indices in `right`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the error's type where it has no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def json_text(data: Any) -> str:
    """JSON that any parser reads: numbers that are not finite become text, such as "Infinity"."""
    return json.dumps(_finite(data), indent=2, default=str, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return json.dumps(data) if isinstance(data, float) and not isfinite(data) else data
