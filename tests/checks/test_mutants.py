"""Faults planted by the hundred in graphs: at least 99 of 100 are caught.

All of them: test_all_mutants.py, and `python tests/mutants/judge.py`, which notes each in a file and goes on where it
stopped.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from mutants import judge
from mutants.operators import OPERATORS
from mutants.reasons import DEFAULT
from mutants.subjects import RECIPES, recipe_of, subject

from workbench import fake_world
from workbench.recipe.contracts import CONTRACTS, Stage

pytestmark = pytest.mark.integration
SUBJECT = "llama3_checkpointing_block_bucketing"
SAMPLE, OF = 30, 80
ROOT = Path(__file__).parents[2]


@pytest.mark.ranks
def test_a_sample_of_mutants_is_caught(pool2):
    with fake_world(2) as world:
        whole = subject(SUBJECT, world)
        mutants = list(itertools.islice(judge.planted(whole, SUBJECT), OF))
        sample = random.Random(0).sample(mutants, SAMPLE)
        table = judge.table_of(list(judge.judge(whole, sample, pool2, locate=False)))
    assert table["whole"]["planted"] == SAMPLE
    assert judge.unmet(table, planted=SAMPLE, operators=20) == []
    assert table["alone"].keys() >= {"lint", "collectives", "numerics"}  # what no other verdict caught


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
    assert all(table["alone"][check] for check in ("lint", "collectives", "ranks", "numerics", "running"))


def test_a_table_that_misses_a_bound_is_told(table):
    whole, operators = table["whole"], table["operators"]
    name = next(iter(operators))
    survivor = {"key": "b", "why": DEFAULT}
    for change, said in (
        ({"whole": whole | {"rate": 0.98}}, "98.0% of all are caught"),
        ({"whole": whole | {"planted": 7}}, "7 mutants of 77 operators"),
        ({"operators": operators | {name: operators[name] | {"rate": 0.9}}}, f"{name}: 90.0% are caught"),
        ({"listed": ["a"]}, "a gives the same bits, and no reason is known"),
        ({"survivors": [survivor]}, "b is not caught, and no reason is known"),
    ):
        assert judge.unmet(table | change, planted=2000, operators=40) == [said]
