"""Faults planted by the hundred in graphs: at least 99 of 100 are caught, and without a verdict fewer are.

All of them: test_all_mutants.py, and `python tests/mutants/judge.py`, which notes each in a file and goes on where it
stopped.
"""

import copy
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutants import judge, running
from mutants.operators import OPERATORS
from mutants.reasons import DEFAULT
from mutants.subjects import RECIPES, recipe_of, subject

from workbench import Outcome, fake_world
from workbench.checks import agreement, collectives, lint
from workbench.recipe.contracts import CONTRACTS, Stage

pytestmark = pytest.mark.integration
SUBJECT = "llama3_checkpointing_block_bucketing"
SAMPLE, OF = 40, 80
ROOT = Path(__file__).parents[2]


def chosen(mutants: list[Any]) -> list[Any]:
    """The sample of one subject's first mutants that is judged each day."""
    return random.Random(0).sample(mutants[:OF], SAMPLE)


@pytest.fixture(scope="module")
def first():
    """One subject and its first mutants, on a fake world that stays open."""
    with fake_world(2) as world:
        whole = subject(SUBJECT, world)
        yield whole, list(itertools.islice(judge.planted(whole, SUBJECT), OF))


def rows_of(subject_and_mutants: Any, pool: Any = None) -> list[dict[str, Any]]:
    whole, mutants = subject_and_mutants
    return list(judge.judge(whole, mutants, pool, locate=False))


def assert_caught(rows: list[dict[str, Any]], **least: int) -> None:
    assert judge.unmet(judge.table_of(rows), **least) == []
    assert {row["by"] for row in rows} >= {"lint", "collectives", "numerics"}


@pytest.mark.ranks
def test_a_sample_of_mutants_is_caught(first, pool2):
    rows = rows_of((first[0], chosen(first[1])), pool2)
    assert len(rows) == SAMPLE
    assert_caught(rows, planted=SAMPLE, operators=30)


def switched_off(check: Any) -> Any:
    """The check in a state where it fails no graph that the others can read."""
    def passing(*args: Any, **options: Any) -> Any:
        found = check(*args, **options)
        return found if found is None or found.evidence.get("malformed") else replace(found, outcome=Outcome.PASS)
    return passing


@pytest.mark.nightly
def test_the_judge_can_fail(first, monkeypatch):
    """Without numerics, and then without one verdict more, fewer mutants are caught: the ones that it alone saw."""
    whole, mutants = first[0], list(first[1])
    planted = [running.Mutant(SUBJECT, "joint", "move_collective", str(seed), "one") for seed in range(4)]
    mutants += [(mutant, made) for mutant in planted if (made := running.mutate(whole.joint, mutant))]
    caught = sum(bool(row["caught"]) for row in rows_of((whole, mutants)))
    assert caught < 0.9 * len(mutants)
    for module, name in ((lint, "lint"), (collectives, "conserved"), (agreement, "difference")):
        with monkeypatch.context() as patch:
            off = switched_off(getattr(module, name)) if name != "difference" else lambda lists: None
            patch.setattr(module, name, off)
            assert sum(bool(row["caught"]) for row in rows_of((whole, mutants))) < caught, name


@pytest.mark.ranks
def test_bisect_names_the_node_and_an_error_of_the_judge_is_no_catch(first, pool2, monkeypatch):
    whole, mutants = first[0], [each for each in first[1] if each[0].operator == "scale_constant"][:1]
    (row,) = judge.judge(whole, mutants, pool2)
    assert row["by"] == "numerics" and row["located"] and not row["named"]
    monkeypatch.setattr(running, "numeric", judge_that_fails)
    with pytest.raises(RuntimeError, match="the judge failed, and not the mutant"):
        list(judge.judge(whole, mutants, pool2))


def judge_that_fails(*_: Any) -> None:
    raise AttributeError("planted")


def test_the_subjects_go_through_every_pass_that_edits_graphs():
    """Where a compiler makes callables of a graph, nothing is left to be mutated."""
    listed = {name for subject in RECIPES for name in recipe_of(subject).pass_names}
    edit = {name for name, contract in CONTRACTS.items() if contract.stage in (Stage.JOINT, Stage.PARTITIONED)
            and contract.source != "user" and not contract.needs & {"compiler", "cuda"}}
    # the subjects' attention has no mask, and a step that is not cut into stages sends no gradient
    edit -= {"causal_attention", "split_backward"}
    assert len(edit) >= 7 and edit <= listed, f"no subject of tests/mutants/subjects.py has {sorted(edit - listed)}"


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text())


def test_the_committed_table_meets_its_bounds(table):
    assert judge.unmet(table, planted=2000, operators=len(OPERATORS)) == []
    assert set(table["operators"]) == set(OPERATORS)


def test_a_table_that_misses_a_bound_is_told(table):
    name = next(iter(table["operators"]))
    for way, value, said in (
        (("whole", "rate"), 0.98, "98.0% of all are caught"), (("whole", "planted"), 7, "7 mutants of 77 operators"),
        (("operators", name, "rate"), 0.9, f"{name}: 90.0% are caught"),
        (("listed",), ["a"], "a gives the same bits, and no reason is known"),
        (("survivors",), [{"key": "b", "why": DEFAULT}], "b is not caught, and no reason is known"),
    ):
        worse = copy.deepcopy(table)
        *inner, last = way
        holder = worse
        for key in inner:
            holder = holder[key]
        holder[last] = value
        assert judge.unmet(worse, planted=2000, operators=40) == [said]
