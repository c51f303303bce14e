"""All planted faults, in a module of its own: the worlds of the subjects need a process without a world."""

import pytest
from mutants import judge
from mutants.operators import OPERATORS


@pytest.mark.integration
@pytest.mark.ranks
@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_all_mutants_are_caught(pool2, tmp_path):
    path = tmp_path / "mutants.jsonl"
    for _ in judge.go_on(path, judge.MUTANTS, pool2):
        pass
    rows = judge.read(path)
    assert judge.unmet(judge.table_of(rows), planted=2000, operators=len(OPERATORS)) == []
    assert {row["by"] for row in rows} >= {"lint", "collectives", "numerics"}
