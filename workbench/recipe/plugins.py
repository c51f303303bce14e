"""The door for packages that add to the workbench: the entry-point group `workbench.plugins`.

An entry names a module of declarations, which imports no torch: `declare(PassContract(..., code=MODULE))` for a pass,
`declare_command(Command(...))` for a command, and `declare_hook(NAME, CODE)` of `recipe.hooks` for all else that the
core calls by name, also a kind of capture or of step. Their code is named by string, and imported when it is used.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

GROUP = "workbench.plugins"


@dataclass(frozen=True)
class Command:
    """A command of the command line. help, description: for --help. arguments: adds its arguments to its parser.

    recipe, changes: a text on what --set may change; the command takes RECIPE, --set and --import, or the last two.
    code: "MODULE:FUNCTION", called with the recipe, if any, and the arguments; it returns the exit status.
    torch: whether to import its code takes seconds, because it imports torch.
    """

    name: str
    help: str
    description: str
    arguments: Callable[[argparse.ArgumentParser], None]
    code: str
    recipe: str = ""
    changes: str = ""
    torch: bool = True


COMMANDS: dict[str, Command] = {}


def declare_command(command: Command) -> Command:
    """Add a command; a second one of its name replaces it."""
    COMMANDS[command.name] = command
    return command


ON_RANKS: dict[str, tuple[Callable[[], Sequence[Any]], Callable[[Any], None]]] = {}


def known_on_ranks(
    kind: str, list_items: Callable[[], Sequence[Any]], install: Callable[[Any], None]
) -> None:
    """Send `list_items()` to the ranks, which call `install(items)`. Items have a `name`; kind: the noun of an item."""
    ON_RANKS[kind] = list_items, install


@cache
def load_plugins() -> None:
    """Import each plugin's declarations, once. One that cannot be imported is a warning: the others load."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # installed metadata outlives a deleted folder
            warnings.warn(
                f"plugin {entry.name!r} ({entry.value}) cannot be loaded, and is left out: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
