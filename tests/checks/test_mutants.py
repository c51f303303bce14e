"""Faults planted by the hundred in graphs: at least 99 of 100 are caught, and without a verdict fewer are.

All of them: `python tests/mutants/judge.py`, which notes each in a file and goes on where it stopped.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from mutants import judge, running
from mutants.operators import OPERATORS
from mutants.subjects import subject

from workbench.checks import collectives, static
from workbench.checks.verdicts import Outcome
from workbench.world.fake import fake_world

pytestmark = pytest.mark.integration
SUBJECT = "llama3_checkpointing_block_bucketing"
SAMPLE, ALL = 200, 2000


@pytest.fixture(scope="module")
def sample():
    """The first mutants of one subject, and the subject, on a fake world that stays open."""
    with fake_world(2) as world:
        whole = subject(SUBJECT, world)
        yield whole, list(itertools.islice(judge.planted(whole, SUBJECT), SAMPLE))


def rows_of(sample: Any, pool: Any = None) -> list[dict[str, Any]]:
    whole, mutants = sample
    return list(judge.judge(whole, mutants, pool, locate=False))


def assert_caught(rows: list[dict[str, Any]]) -> None:
    table = judge.rates(rows)
    few = {name: row["rate"] for name, row in table.items() if row["rate"] is not None and row["rate"] < 0.95}
    assert not few and judge.rate(rows) >= 0.99
    assert {row["by"] for row in rows} >= {"lint", "collectives", "numerics"}


@pytest.mark.ranks
def test_a_sample_of_mutants_is_caught(sample, pool2):
    rows = rows_of(sample, pool2)
    assert len({row["operator"] for row in rows}) >= 60
    assert_caught(rows)


def switched_off(check: Any) -> Any:
    """The check in a state where it fails no graph that the others can read."""
    def passing(*args: Any, **options: Any) -> Any:
        found = check(*args, **options)
        return found if found is None or found.evidence.get("malformed") else replace(found, outcome=Outcome.PASS)
    return passing


def test_the_judge_can_fail(sample, monkeypatch):
    """Without numerics, and then without one verdict more, fewer mutants are caught: the ones that it alone saw."""
    whole, mutants = sample[0], sample[1][: len(OPERATORS)]
    planted = [running.Mutant(SUBJECT, "joint", "move_collective", str(seed), "one") for seed in range(4)]
    mutants += [(mutant, made) for mutant in planted if (made := running.mutate(whole.joint, mutant))]
    caught = sum(bool(row["caught"]) for row in rows_of((whole, mutants)))
    assert caught < 0.9 * len(mutants)
    for module, name in ((static, "_lint"), (collectives, "conserved"), (collectives, "difference")):
        with monkeypatch.context() as patch:
            off = switched_off(getattr(module, name)) if name != "difference" else lambda lists: None
            patch.setattr(module, name, off)
            assert sum(bool(row["caught"]) for row in rows_of((whole, mutants))) < caught, name


def test_every_operator_says_what_it_does_and_can_be_planted(sample):
    assert len(OPERATORS) >= 40
    assert all(item.about.endswith(".") for item in OPERATORS.values())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(5400)
def test_all_mutants_are_caught(pool2, tmp_path):
    assert_caught(list(judge.judged(ALL, pool2)))
