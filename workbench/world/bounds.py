"""How many ranks this machine can start, checked before any of them takes memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.recipe.wording import counted

RANKS_A_CORE = 32  # starting a rank takes 1.7 s of a core, and all must start within START_SECONDS
# measured: what an idle rank has of its own; one that builds a recipe has more
RANK_BYTES = 144 << 20
FAKE_RANKS = 1 << 21  # measured: a million ranks take 3 s and 150 MB to lay out; both grow linearly
_CGROUP = Path("/sys/fs/cgroup")


def refuse_too_many(n: int) -> None:
    """WorkbenchError, with what to do instead, if this machine cannot start `n` ranks."""
    most, why = min(_bounds())
    if n > most:
        raise WorkbenchError(
            f"ranks(n={n}): this machine can start {counted(most, 'rank')} at most ({why}). Start fewer, with a "
            "smaller mesh, or take a fake world (--world fake, fake_world(n)), which has up to "
            f"{FAKE_RANKS:,} ranks in one process."
        )


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bounds() -> list[tuple[int, str]]:
    """The number of ranks that cores and free memory allow, and why."""
    bounds = [(cores() * RANKS_A_CORE, f"{RANKS_A_CORE} for each of {counted(cores(), 'core')}")]
    if (free := _memory()) is not None:
        why = f"{RANK_BYTES >> 20} MiB for each, and {free >> 20:,} MiB are free"
        bounds.append((free // RANK_BYTES, why))
    return bounds


def _memory() -> int | None:
    """Free bytes of the machine, at most the container's limit. None if neither can be read."""
    bounds = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        bounds = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for limit in (_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes"):
        if (allowed := _number(limit)) is not None:
            bounds.append(allowed)
    return min(bounds, default=None)


def _number(file: Path) -> int | None:
    """The number in a file; None if the file does not exist or holds `max`."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
