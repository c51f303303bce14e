"""What "The tour" says about recorded steps holds for the records, and its graders name what is missing."""

from __future__ import annotations

import pytest

from workbench_lessons.l00_tour.tour import saves_less, unnoticed

MOST = {"collectives": 27, "saved bytes": 169_632}


@pytest.mark.parametrize(("collectives", "saved", "score", "said"), [
    (29, 118_656, 0.5, "29 collectives, 27 allowed: the backward repeats the layer's reduce-scatters; 118,656 saved b"),
    (27, 168_832, 1.0, "27 collectives, 27 allowed; 168,832 saved bytes, 169,632 allowed"),
])
def test_saving_less_scores_each_condition(collectives: int, saved: int, score: float, said: str) -> None:
    got = saves_less(dict(zip(MOST, (collectives, saved), strict=True)), most=MOST)
    assert got[0] == pytest.approx(score) and said in got[1] and len(got[2]) == 2


@pytest.mark.parametrize(("options", "said"), [
    ({"policy": "selective", "every_nth_matmul": 2}, "; n = 2 keeps b"), ({}, "; n = 2 keeps b"),
    ({"policy": "selective", "every_nth_matmul": 4}, "; n = 4 keeps no product"), ({"policy": "full"}, " allowed"),
])
def test_saving_less_names_the_products_that_are_kept(options: dict[str, object], said: str) -> None:
    got = saves_less(dict(MOST), most=MOST, options=options, products=("a", "b", "c"))
    assert got[1].endswith(said)


@pytest.mark.parametrize(("loss", "gradient", "failed", "score", "said"), [
    (0.067, 12.7, [], 1 / 3, "AdamW takes other steps; the worst gradient is wrong by 13 % of its norm, 50 % wanted"),
    (0.0, 100.0, ["effect"], 2 / 3, "effect did not pass"),
    (0.0, 0.0, ["effect"], 1 / 3, "the pass changed nothing, so its effect is NO_EFFECT"),
    (0.0001, 50.0, [], 1.0, "no loss differs by more than 0.000 %"),
    (float("nan"), 100.0, [], 2 / 3, "nan %"),
])
def test_an_unnoticed_pass_scores_each_condition(loss: float, gradient: float, failed: list[str], score: float,
                                                 said: str) -> None:
    given = {"loss": loss, "first loss": 0.0, "gradient": gradient, "failed": failed}
    found = unnoticed(given)
    assert found[0] == pytest.approx(score) and said in found[1]
    assert "change only what follows `# backward`" in unnoticed(given | {"loss": 0.067, "first loss": 0.013})[1]
    assert unnoticed({"stopped": "no"}) == (0.0, "the run stopped: no")
    assert unnoticed(None) == unnoticed({"loss": "0"}) == (0.0, "give the figures of a run")
