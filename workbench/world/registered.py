"""Register on the ranks what the user has registered in this process, such as passes and models.

The layers above declare how to list and install each kind (`known_on_ranks`). A pool sends all of it with a call if
its pickle has changed since the last one: a cell was run again, or a global that a pass reads has a new value.
"""

from __future__ import annotations

import pickle
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.plugins import ON_RANKS
from workbench.world.pickling import dumps


def packed() -> bytes:
    """A pickle of what this process has registered, for `unpack`; b"" if nothing.

    It is one pickle, so that passes of one cell share its globals on the ranks, too. WorkbenchError names an item that
    cannot be pickled.
    """
    registrations = [
        (install, listed) for list_items, install in ON_RANKS.values() if (listed := list_items())
    ]
    if not registrations:
        return b""
    try:
        return dumps(registrations)
    except Exception as error:
        for kind, (list_items, _) in ON_RANKS.items():
            for item in list_items():
                _refuse(kind, item)
        raise WorkbenchError(
            f"what is registered here cannot be sent to the ranks: {error}"
        ) from None


def _refuse(kind: str, item: Any) -> None:
    try:
        dumps(item)
    except Exception as error:
        raise WorkbenchError(
            f"{kind} {item.name!r} is registered here, and cannot be sent to the ranks: {type(error).__name__}: "
            f"{error}. Create what cannot be pickled inside the function, and register it again"
        ) from None


def unpack(sent: bytes) -> None:
    """In a rank: install what `packed` returned."""
    for install, listed in pickle.loads(sent):
        install(listed)
