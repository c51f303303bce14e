"""Passes and models that a test registers, in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def registrations_restored() -> Iterator[None]:
    """What is registered inside is gone afterwards: every later pool would send it to its ranks."""
    places = {"workbench.passes.registry": "_PASSES", "workbench.recipe.contracts": "CONTRACTS",
              "workbench.authoring.families": "_FAMILIES", "workbench.recipe.model_sizes": "SIZES"}
    tables = {place: getattr(sys.modules[place], name) for place, name in places.items() if place in sys.modules}
    before = {place: dict(table) for place, table in tables.items()}
    yield
    for place, table in tables.items():
        table.clear()
        table |= before[place]
