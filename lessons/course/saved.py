"""What the forward saves for the backward, as a table."""

from __future__ import annotations

import re

from workbench.graph.partition import ForwardBackward
from workbench.graph.read.memory import SavedTensor, saved_tensors
from workbench.notebook.draw.picture import Table, table


def saved(pair: ForwardBackward, *, gathered: bool = False, least: int = 1) -> Table:
    """The tensors saved for the backward, largest first: each storage counts once, inputs do not count.

    The same tensor of identical layers is one row, with the bytes of all of them. gathered: only tensors that keep a
    gathered parameter alive, with the chain of views to it. least: leave out tensors that hold fewer bytes; the line
    below counts all.
    """
    rows = saved_tensors(pair.forward, pair.backward)
    picked = [r for r in rows if (r.gathered is not None and not r.copied if gathered else True)
              and r.held_bytes >= least]
    total, mine = sum(r.held_bytes for r in rows), sum(r.held_bytes for r in picked)
    notes = (f"{len(picked)} of {len(rows)} saved tensors, {mine:,} of {total:,} bytes",)
    alike: dict[tuple[object, ...], list[SavedTensor]] = {}
    for row in picked:
        stem = row.name if gathered else _NUMBER.sub("", row.name)
        alike.setdefault((stem, row.shape, row.dtype, row.held_bytes, row.policy, row.source, bool(row.gathered),
                          _LAYER.sub("*", row.module)), []).append(row)
    shown = []
    for rows in sorted(
        alike.values(), key=lambda rows: (-sum(r.held_bytes for r in rows), rows[0].name)
    ):
        r = rows[0]
        name = r.name if len(rows) == 1 else f"{r.name} x {len(rows)}"
        facts = (name, list(r.shape), r.dtype, sum(x.held_bytes for x in rows), _modules(rows))
        kind = "a gathered parameter" if r.gathered else "an activation"
        shown.append(
            (*facts, *((" > ".join(r.alias),) if gathered else (kind, r.policy, r.source)))
        )
    last = (
        ("chain to the storage's owner",) if gathered else ("what it is", "policy", "source line")
    )
    heads = ("tensor", "shape", "dtype", "bytes held", "module", *last)
    return table("saved between forward and backward", heads, shown, *notes)


_NUMBER = re.compile(r"_\d+$")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _modules(rows: list[SavedTensor]) -> str:
    """The module path; for identical layers with the smallest and the largest number: `layers.0-3.attention`."""
    columns = zip(*(map(int, _LAYER.findall(row.module)) for row in rows), strict=True)
    ranges = iter([f"{min(c)}-{max(c)}" if min(c) < max(c) else str(c[0]) for c in columns])
    return _LAYER.sub(lambda _: next(ranges), rows[0].module) or "the model itself"
