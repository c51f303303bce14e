"""Ranks that tests end, and the rows of faults that `--results-json` keeps (tests/conftest.py)."""

import tempfile

import pytest

from workbench.world.ranks import ranks


@pytest.fixture(scope="session")
def harmed():
    """Two gloo ranks that tests may end: the next call starts others. A test that sets `timeout` sets it back."""
    with ranks(2, timeout=30, echo="none", backend="gloo") as running:
        yield running


@pytest.fixture
def row(record_property):
    """Puts a row into the table, and holds what it says: no orphan, and the next call works."""

    def add(ranks, fault, seconds, orphans, works):
        record_property("fault_row", (ranks, fault, f"{seconds:.1f}", len(orphans), "yes" if works else "NO"))
        assert orphans == [] and works

    return add


@pytest.fixture
def private_folder(tmp_path, monkeypatch):
    """The folder of all temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
