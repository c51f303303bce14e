"""Each planted pipeline: its cause is the one right answer. The notebook shows its verdicts."""

from typing import Any

import pytest
from torch.fx import GraphModule

from workbench import compare_schedules
from workbench.graph.read.memory import gathered_parameters_kept
from workbench.lab.bisect import bisect
from workbench_lessons.course.grading import grade
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l13_find_the_wrong_pass.examine import gathers, run_pipeline
from workbench_lessons.l13_find_the_wrong_pass.suspects import REPAIRS, cause, pipeline

pytestmark = pytest.mark.integration
CAUSES = {"winds": ("south", "layer.1"), "stones": ("coral", "permute_6"),
          "metals": ("iron", "all_gather_into_tensor_1")}  # the checkpoints; the text itself solves trees
INSTEAD = {  # of each checkpoint: wrong second names, and what is said of them
    "winds": {"layers.1": "is not the wrong path in the options"},
    "stones": {"mmm": "is no node of these graphs", "permute": "keeps a gathered weight, but not the largest"},
    "metals": {"all_gather_into_tensor_7": "is launched by both ranks at the same place"},
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_and_no_other_answer_is_right(name: str) -> None:
    records, pair = run_pipeline(name, 16)
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


def kept(name: str, **how: Any) -> int:
    _, pair = run_pipeline(name, 16, **how)
    return sum(row.bytes for row in gathered_parameters_kept(pair.forward, pair.backward))


def tag_views(gm: GraphModule) -> None:  # as the solution of stones
    for node in gm.graph.nodes:
        if len(node.all_input_nodes) == 1 and (tag := node.all_input_nodes[0].meta.get("recompute")):
            node.meta["recompute"] = tag


def order(rank: int, without: str) -> list[str]:
    return [n.name for n in gathers(run_pipeline("metals", 16, rank, without)[1].forward)]


def test_the_solutions_prove_the_faults() -> None:
    assert kept("stones") == kept("stones", without="coral") > kept("stones", edit=tag_views) == 0
    assert len(gathers(run_pipeline("winds", 16)[1].forward)) == 6
    assert len(gathers(run_pipeline("winds", 16, without="south")[1].forward)) == 8
    assert [name for name in ("lead", "iron", "tin") if order(0, name) == order(1, name)] == ["iron"]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "said"), [
    ("winds", "nothing found"), ("stones", "nothing found"), ("metals", "'iron'")])
def test_bisect_names_the_pass_of_metals_alone(name: str, said: str) -> None:
    assert said in str(bisect(pipeline(name), world="gloo", progress=False))


@pytest.mark.nightly
def test_metals_differ_between_ranks() -> None:
    verdict = compare_schedules(pipeline("metals"), ranks="all").verdict
    assert verdict.outcome == "FAIL" and "the ranks would hang" in verdict.message
