"""MemoryPlan: whether each tensor that the backward needs is saved or computed again, with prices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from workbench.recipe.wording import aligned

Act = Literal["save", "recompute"]
_NUMBER = re.compile(r"(?<=layers\.)\d+")


@dataclass(frozen=True)
class Choice:
    """One tensor. bytes: of its memory. ms: of its operator, which the backward runs again where `choice` is recompute;
    0 for a second result of the same operator. fixed: why there was no choice, or "".
    """

    name: str
    module: str
    operator: str
    bytes: int
    ms: float
    choice: Act
    fixed: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """budget, least: bytes that may be saved on the device, and the fewest that could be. bound_ms: no plan within the
    budget adds less time than this; it covers plans that treat alike layers differently, too. device: of the times.
    decided_ms: what the backward computes again, since an earlier pass said so, where no collective is hidden; no plan
    pays for it, and `ms` leaves it out.
    """

    budget: int
    least: int
    bound_ms: float
    device: str
    choices: tuple[Choice, ...] = field(repr=False)
    decided_ms: float = 0.0

    @property
    def saved(self) -> tuple[Choice, ...]:
        return tuple(c for c in self.choices if c.choice == "save")

    @property
    def saved_bytes(self) -> int:
        return sum(c.bytes for c in self.saved)

    @property
    def ms(self) -> float:
        """What the backward computes again, by decision of this plan."""
        return sum(c.ms for c in self.choices if c.choice == "recompute")

    @property
    def gap(self) -> float:
        """How much of `ms` the best plan could do without, at most."""
        return max(0.0, 1 - self.bound_ms / self.ms) if self.ms else 0.0

    @property
    def summary(self) -> str:
        best = f"no plan computes less than {self.bound_ms:.4g} ms"
        if self.decided_ms:
            best += f"; by earlier passes, at most {self.decided_ms:.4g} ms more"
        return (f"saves {self.saved_bytes:,} bytes of a budget of {self.budget:,} (at least {self.least:,}), and "
                f"computes {self.ms:.4g} ms again on {self.device}; {best}")

    def __str__(self) -> str:
        """The plan as a table; alike layers that are treated alike share a row."""
        head = ("tensor", "module", "operator", "bytes", "choice", "ms", "fixed")
        rows = [(c.name, c.module, c.operator, f"{c.bytes:,}", c.choice, f"{c.ms:.4g}", c.fixed)
                for c, _ in alike(self.choices)]
        return "\n".join([self.summary, *aligned([head, *rows], (3, 5))])

    def diff(self, other: MemoryPlan) -> list[tuple[Choice | None, Choice | None]]:
        """(here, in the other) of each tensor that the two treat differently; None where one does not need it."""
        mine, theirs = ({c.name: c for c in plan.choices} for plan in (self, other))
        pairs = [(mine.get(name), theirs.get(name)) for name in dict.fromkeys([*mine, *theirs])]
        return [(a, b) for a, b in pairs if (a and a.choice) != (b and b.choice)]


def alike(choices: Iterable[Choice]) -> list[tuple[Choice, list[Choice]]]:
    """Tensors of several layers that agree in all but the layer, as one row with their bytes and ms together.

    Its module names the layers, such as `layers.0-15.attention`, and its name is the first one's.
    """
    groups: dict[tuple[object, ...], list[Choice]] = {}
    seen: dict[tuple[str, str], int] = {}
    for each in choices:
        own = (each.module, each.operator)
        place = seen[own] = seen.get(own, -1) + 1  # the n-th of this operator in this module
        key = (_NUMBER.sub("*", each.module), each.operator, place, each.bytes, each.choice, each.fixed)
        groups.setdefault(key, []).append(each)
    return [(replace(same[0], module=_named(same), bytes=sum(c.bytes for c in same), ms=sum(c.ms for c in same)), same)
            for same in groups.values()]


def _named(same: list[Choice]) -> str:
    numbers = sorted({int(found.group()) for c in same if (found := _NUMBER.search(c.module))})
    if len(numbers) < 2:
        return same[0].module
    together = numbers[-1] - numbers[0] == len(numbers) - 1
    text = f"{numbers[0]}-{numbers[-1]}" if together else ",".join(map(str, numbers))
    return _NUMBER.sub(text, same[0].module, count=1)
