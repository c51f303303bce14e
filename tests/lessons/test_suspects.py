"""Each planted pipeline: what sees its fault, what does not, and that the sound pass in its place heals it."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from registrations import registrations_restored

from workbench import PassRecord, author, capture, compare_schedules, fake_world, find_nodes
from workbench.graph.partition import ForwardBackward, partition
from workbench.notebook.draw.step import changes
from workbench.pipeline.run_passes import run_joint, run_partitioned
from workbench_lessons.course.grading import grade
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l13_find_the_wrong_pass.suspects import PIPELINES, REPAIRS, cause, pipeline

pytestmark = pytest.mark.integration
CAUSES = {"winds": ("south", "layer.1"), "stones": ("coral", "permute_6"),
          "metals": ("iron", "all_gather_into_tensor_1")}  # the checkpoints; the text itself solves trees

_UNKNOWN = {"mmm": "is no node of these graphs"}
INSTEAD = {  # of each checkpoint: wrong second names, and what is said of them
    "winds": {"layers.1": "is not the wrong path in the options"},
    "stones": _UNKNOWN | {"permute": "keeps a gathered weight, but not the largest"},
    "metals": _UNKNOWN | {"all_gather_into_tensor_7": "is launched by both ranks at the same place"},
}


@cache
def examined(name: str, rank: int = 0) -> tuple[list[PassRecord], ForwardBackward]:
    """The records and graphs of a pipeline."""
    recipe = pipeline(name)
    with fake_world(2, rank) as world:
        joint = capture(author(recipe, world))
        records = list(run_joint(joint, recipe.joint_passes))
        pair = partition(joint, by="default")
        return records + list(run_partitioned(pair, recipe.passes)[0]), pair


def gathers(graph: Any) -> list[str]:
    return [n.name for n in find_nodes(graph, op="all_gather_into_tensor*")]


@pytest.fixture(scope="module", params=sorted(PIPELINES))
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[PassRecord], ForwardBackward]]:
    with registrations_restored():
        pipeline(request.param)  # which registers its passes
        yield (request.param, *examined(request.param))


@pytest.mark.parametrize("case", sorted(CAUSES), indirect=True)
def test_the_cause_and_no_other_answer_is_right(case: tuple[str, list[PassRecord], ForwardBackward]) -> None:
    name, records, pair = case
    assert cause(name, records, pair.graphs) == CAUSES[name]
    check, given = "workbench_lessons.l13_find_the_wrong_pass.suspects:named", {"case": (records, pair)}
    culprit, place = CAUSES[name]
    wrong = next(r for r in records if r.name == culprit)
    other = next(r.name for r in records if r.name != culprit)
    right = (1.0, f"right: {REPAIRS[name]}")
    assert grade(check, (culprit, place), given)[:2] == grade(check, [wrong, f" {place}"], given)[:2] == right
    for text, said in INSTEAD[name].items():
        assert grade(check, [culprit, text], given)[:2] == (0.5, f"the pass is right, and {text} {said}")
    reacts = load_lesson("13_find_the_wrong_pass").checkpoint(name).reacts
    assert all(sum(words in f" and x {said}" for words in reacts) == 1 for said in INSTEAD[name].values())
    for wrong_pair, said in (((other, place), "another pass"), (culprit, "give two texts: the pass, and what the task "
                             "asks for"), ((place, culprit), "the pass comes first, then what the task asks for")):
        assert grade(check, wrong_pair, given)[:2] == (0.0, said)


def test_the_light_verdicts_blame_nobody_but_a_victim(case: tuple[str, list[PassRecord], ForwardBackward]) -> None:
    name, records, _ = case
    outcomes = {str(v.outcome) for r in records for v in r.verdicts if v.check != "effect"}
    assert outcomes <= {"PASS", "UNKNOWN"}
    effects = {r.name: verdict.outcome for r in records if (verdict := r.verdict("effect")) is not None}
    assert [n for n, said in effects.items() if said != "PASS"] == (["yew"] if name == "trees" else [])


@pytest.mark.nightly
def test_metals_differ_between_ranks() -> None:
    verdict = compare_schedules(pipeline("metals"), ranks="all").verdict
    assert verdict.outcome == "FAIL" and "the ranks would hang" in verdict.message
    first, other = (examined("metals", rank=rank)[0][2] for rank in (0, 1))
    assert gathers(first.before[0]) == gathers(other.before[0])
    assert gathers(first.after[0])[:2] == gathers(other.after[0])[1::-1]
    moved = [{row[1] for row in changes(record).rows if row[0] == "forward"} for record in (first, other)]
    assert moved == [{"(moved, now in front of wait_tensor)"}, {"(moved, now in front of all_gather_into_tensor)"}]
