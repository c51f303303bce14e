"""The order of a graph's blocks, and the order of a graph with more blocks.

Each section of a joint graph (parameters, buffers, forward, backward, outputs) lists the blocks in order, the backward
in reverse order. So the nodes of two neighbouring blocks are two adjacent stretches of equal length: `Turns`. Copies go
between the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.errors import NotAlike


@dataclass(frozen=True)
class Names:
    """The block of a path, and the name of each path in the longer graph.

    pattern: finds a block's number. lower, extra: as in `AlikeBlocks`. modules: the key that Dynamo gives each module
    path of the large module.
    """

    pattern: re.Pattern[str]
    lower: int
    extra: int
    modules: dict[str, str]

    def block(self, path: str | None) -> int | None:
        found = self.pattern.search(path or "")
        return int(found[2]) if found else None

    def moved(self, path: str, by: int) -> str:
        return self.pattern.sub(lambda m: f"{m[1]}{int(m[2]) + by}", path, count=1)

    def outside(self, path: str) -> str:
        """The name in the large module of a path outside the alike blocks."""
        block = self.block(path)
        return path if block is None or block <= self.lower else self.moved(path, self.extra)

    def of_copy(self, path: str, copy: int | None) -> str:
        """The name of a path of the lower block in one of its copies; None for a path outside or of the upper block."""
        return self.outside(path) if copy is None else self.moved(path, copy)


@dataclass(frozen=True)
class Turns:
    """Two stretches of `length` items of a list: the lower block's from `lower`, the upper block's from `upper`."""

    lower: int
    upper: int
    length: int


def turns_of(keys: Sequence[tuple[str, int | None]], block: int) -> list[Turns]:
    """The stretches of `block` and of the next, in each section of a list of (section, block or None).

    Raises NotAlike where they are not two adjacent stretches.
    """
    found = []
    for section in dict.fromkeys(name for name, _ in keys):
        places = {b: [i for i, key in enumerate(keys) if key == (section, b)] for b in (block, block + 1)}
        lower, upper = places[block], places[block + 1]
        if not lower and not upper:
            continue
        if not lower or not upper:
            raise NotAlike(f"layers.{block} and layers.{block + 1} do not both have {section} nodes")
        start, end = min(lower[0], upper[0]), max(lower[0], upper[0])
        length = end - start
        for b, own in places.items():
            inside = range(own[0], own[0] + length)
            if own[-1] not in inside or any(keys[i][0] != section or keys[i][1] not in (b, None) for i in inside
                                            if i < len(keys)):
                raise NotAlike(f"layers.{b}: its {section} nodes are not one stretch as long as its neighbour's")
        found.append(Turns(lower[0], upper[0], length))
    return found


def longer(count: int, turns: Iterable[Turns], extra: int) -> list[tuple[int, int | None]]:
    """(place in the list, copy) for each item of the longer list; copy is None outside and in the upper block.

    The lower block is copy 0. Its further copies come between the two blocks, in the order of the section.
    """
    order: list[tuple[int, int | None]] = []
    place = 0
    for turn in sorted(turns, key=lambda t: min(t.lower, t.upper)):
        first = min(turn.lower, turn.upper)
        order += [(i, None) for i in range(place, first)]
        rows: list[tuple[int, int | None]] = [(turn.lower, c) for c in range(extra + 1)] + [(turn.upper, None)]
        for start, copy in rows if turn.lower < turn.upper else rows[::-1]:
            order += [(start + i, copy) for i in range(turn.length)]
        place = first + 2 * turn.length
    return order + [(i, None) for i in range(place, count)]
