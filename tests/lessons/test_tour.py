"""What "The tour" shows are the figures of its step and of the records, and its graders name what is missing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench import WorkbenchError
from workbench_lessons.l00_tour.solution import unnoticed as solution
from workbench_lessons.l00_tour.tour import (
    compared,
    largest_difference,
    saves_less,
    unnoticed,
)

MOST = {"collectives": 27, "saved bytes": 169_632}
Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(("collectives", "saved", "score", "said"), [
    (29, 118_656, 0.5, "29 collectives, 27 allowed: the backward repeats the layer's reduce-scatters; 118,656 saved b"),
    (27, 168_832, 1.0, "27 collectives, 27 allowed; 168,832 saved bytes, 169,632 allowed"),
])
def test_saving_less_scores_each_condition(collectives, saved, score, said):
    got = saves_less(dict(zip(MOST, (collectives, saved), strict=True)), most=MOST)
    assert got[0] == pytest.approx(score) and said in got[1] and len(got[2]) == 2


@pytest.mark.parametrize(("options", "said"), [
    ({"policy": "selective", "every_nth_matmul": 2}, "; n = 2 saves b"), ({}, "; n = 2 saves b"),
    ({"policy": "selective", "every_nth_matmul": 4}, "; n = 4 saves no matmul"), ({"policy": "full"}, " allowed"),
])
def test_saving_less_names_the_matmuls_that_are_kept(options, said):
    got = saves_less(dict(MOST), most=MOST, options=options, products=("a", "b", "c"))
    assert got[1].endswith(said)


@pytest.mark.parametrize(("loss", "cosine", "failed", "score", "said"), [
    (0.067, 0.5, [], 2 / 3, "AdamW takes other steps; the cosine with the right gradient is 0.50"),
    (0.0, 0.5, ["effect"], 2 / 3, "effect did not pass"),
    (0.0, 1.0, [], 0.0, "the cosine with the right gradient is 1.00, at most 0.9 wanted"),
    (0.0001, 0.9, [], 1.0, "no loss differs by more than 0.01 %"),
    (float("nan"), 0.5, [], 2 / 3, "nan %"),
])
def test_an_unnoticed_pass_scores_each_condition(loss, cosine, failed, score, said):
    given = {"loss": loss, "first loss": 0.0, "cosine": cosine, "failed": failed}
    found = unnoticed(given)
    assert found[0] == pytest.approx(score) and said in found[1]
    assert "so the forward is wrong, too" in unnoticed(given | {"loss": 0.067, "first loss": 0.013})[1]
    assert unnoticed({"stopped": "no"}) == (0.0, "the run stopped: no")
    assert unnoticed(None) == unnoticed({"loss": "0"}) == (0.0, "give the figures of a run")


def report(*losses: float, failed: tuple[str, ...] = ()) -> Any:
    checks = [SimpleNamespace(check=name, outcome="FAIL" if name in failed else "PASS")
              for name in ("lint", "effect", "collectives", "numerics")]
    return SimpleNamespace(training=SimpleNamespace(losses=losses), passes=[SimpleNamespace(verdicts=checks)])


@pytest.mark.parametrize(("gradient", "failed", "score"), [
    (solution(), (), 1), (solution(), ("lint",), 2 / 3), (lambda g, x: 2 * (g.t() @ x), (), 0),
    (lambda g, x: -(g.t() @ x), (), 1),  # the losses, which are given here, would tell
])
def test_a_run_is_compared_with_the_right_one(gradient, failed, score):
    given = compared(report(2.0, 1.0), lambda: report(2.0, 1.00001, failed=("numerics", *failed)), gradient)
    assert unnoticed(given)[0] == pytest.approx(score)
    assert given["loss"] == pytest.approx(0.001) and given["failed"] == list(failed)


def test_a_run_that_stops_and_the_largest_difference_are_told():
    def stops() -> Any:
        raise WorkbenchError("no\nmore")

    assert compared(report(1.0), stops, solution()) == {"stopped": "no"}
    assert largest_difference(report(2.0, 1.0), report(2.0, 1.00001)) == "no loss differs by more than 0.01 %"
    assert largest_difference(report(2.0), report(2.05)) == "no loss differs by more than 2.50 %"
