"""Python's garbage collector, kept waiting where graphs are made: they are many objects, and little of it garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector waits: little here is garbage, and it would search the whole process for it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
