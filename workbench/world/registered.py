"""What is registered in this process, for its ranks to know as well: one rule for every call of a pool.

The layers above say how to list and install their kind (`known_on_ranks`); a pool sends all of it with a call
where its pickle is not what the ranks had last, so that a cell run twice, or a global that a pass reads, counts there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.world.pickling import dumps

_KINDS: dict[str, tuple[Callable[[], Sequence[Any]], Callable[[Any], None]]] = {}


def known_on_ranks(kind: str, own: Callable[[], Sequence[Any]], install: Callable[[Any], None]) -> None:
    """Have ranks know what `own()` lists here: `install(list)` there. Each item has a name; kind: how to call one."""
    _KINDS[kind] = own, install


def packed() -> bytes:
    """What this process has registered, for `unpack`; b"" where that is nothing. WorkbenchError names what cannot go.

    In one pickle, so that passes of one cell share its globals on the ranks, too.
    """
    found = [(install, listed) for own, install in _KINDS.values() if (listed := own())]
    if not found:
        return b""
    try:
        return dumps(found)
    except Exception as error:
        for kind, (own, _) in _KINDS.items():
            for item in own():
                _refuse(kind, item)
        raise WorkbenchError(f"what is registered here cannot be sent to the ranks: {error}") from None


def _refuse(kind: str, item: Any) -> None:
    try:
        dumps(item)
    except Exception as error:
        raise WorkbenchError(
            f"{kind} {item.name!r} is registered here, and cannot be sent to the ranks: {type(error).__name__}: "
            f"{error}. Make what cannot be pickled inside the function, and register it again") from None


def unpack(sent: bytes) -> None:
    """In a rank: install what `packed` made."""
    for install, listed in pickle.loads(sent):
        install(listed)
