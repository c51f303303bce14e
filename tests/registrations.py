"""Passes and models that a test registers, in this process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def registrations_restored() -> Iterator[None]:
    """What is registered inside is gone afterwards: every later pool would send it to its ranks."""
    places = {"workbench.passes.registry": "_PASSES", "workbench.recipe.contracts": "CONTRACTS",
              "workbench.authoring.families": "_FAMILIES", "workbench.recipe.model_sizes": "SIZES",
              "workbench.tools.own_files": "_FILES"}
    tables = {place: getattr(sys.modules[place], name) for place, name in places.items() if place in sys.modules}
    tables = {place: getattr(table, "data", table) for place, table in tables.items()}
    before = {place: dict(table) for place, table in tables.items()}
    try:
        yield
    finally:
        for place, table in tables.items():
            packaged = {name: item for name, item in table.items() if is_packaged(item)}
            table.clear()
            table |= packaged | before[place]


def is_packaged(item: Any) -> bool:
    """Whether a pass, or its contract, is the package's own: such a one is registered once, when it is first used."""
    return getattr(getattr(item, "contract", item), "source", "user") != "user"
