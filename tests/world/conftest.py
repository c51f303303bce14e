"""The table of faults: its rows are recorded here and printed at the end of the run (tests/conftest.py)."""

from __future__ import annotations

import pytest


@pytest.fixture
def row(record_property):
    """Puts a row into the table, and holds what it says: no orphan, and the next call works."""

    def add(ranks, fault, seconds, orphans, works):
        record_property("fault_row", (ranks, fault, f"{seconds:.1f}", len(orphans), "yes" if works else "NO"))
        assert orphans == [] and works

    return add
