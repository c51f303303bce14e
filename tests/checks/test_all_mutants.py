"""All planted faults, in a module of its own: the worlds of the subjects need a process without a world.

A second try goes on where the first was stopped, while package, mutants and torch stay the same.
"""

import hashlib
from pathlib import Path

import pytest
import torch
from mutants import judge
from mutants.operators import OPERATORS

pytestmark = [pytest.mark.integration, pytest.mark.ranks, pytest.mark.nightly, pytest.mark.timeout(5400)]
ROOT = Path(__file__).parents[2]


def sources() -> str:
    """A digest of what a row depends on: the package, the mutants and torch."""
    found = hashlib.sha256(torch.__version__.encode())
    for path in sorted([*(ROOT / "workbench").rglob("*.py"), *(ROOT / "tests" / "mutants").glob("*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def test_all_mutants_are_caught(pool2):
    path = ROOT / "out" / f"mutants-{sources()}.jsonl"
    for _ in judge.go_on(path, judge.MUTANTS, pool2):
        pass
    rows = judge.read(path)
    assert judge.unmet(judge.table_of(rows), planted=2000, operators=len(OPERATORS)) == []
    assert {row["by"] for row in rows} >= {"lint", "collectives", "numerics"}
