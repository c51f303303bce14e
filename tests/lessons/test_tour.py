"""What "The tour" says about recorded steps holds for the records, and its graders name what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.recipe.files import json_lines
from workbench.tools.compatibility import results_dir
from workbench_lessons.l00_tour.tour import RUNS, recorded_steps, saves_less, slowest_products, unnoticed

MOST = {"collectives": 27, "saved bytes": 169_632}


def test_the_recorded_steps_hold_what_the_notebook_says() -> None:
    rows = recorded_steps().rows
    steps = {(where[-4:], passes): [float(ms) for ms in times.split(", ")] for where, passes, times, *_ in rows}
    peaks = {passes: float(peak) for where, passes, *_, peak in rows if where.endswith("H200")}
    launches = {passes: int(count.replace(",", "")) for where, passes, *_, count, _ in rows if where.endswith("H200")}
    slow, fast = steps["anks", "none"], steps["anks", "bucketing"]
    assert 0.5 * max(slow) < max(fast) < 0.6 * min(slow)  # "almost half"
    none, bucketed = steps["H200", "none"], steps["H200", "bucketing"]
    assert min(none) < min(bucketed) and max(bucketed) < max(none)  # "inside the range of the runs without"
    checkpointed = steps["H200", "checkpointing"] + steps["H200", "checkpointing, bucketing"]
    assert max(none) <= min(checkpointed) <= max(checkpointed) < 1.05 * max(none)  # "next to the slowest run"
    assert min(steps["H200", "all four of the tour"]) > 2 * max(none + checkpointed)
    assert 0.6 * peaks["none"] < peaks["checkpointing"] < 2 / 3 * peaks["none"]
    tour, compiled = "all four of the tour", list(peaks)[-1]
    assert launches[tour] > 1.5 * launches["checkpointing, bucketing"] and launches[compiled] < 100
    (whole,), (part,) = steps["H200", tour], steps["H200", "checkpointing, bucketing"]
    assert launches[tour] / launches["checkpointing, bucketing"] < 0.7 * whole / part  # "only a part"
    assert all(peaks[f"{name}bucketing"] == peaks[each] for name, each in
               (("", "none"), ("checkpointing, ", "checkpointing")))  # "stays as it is"
    assert steps["H200", compiled] < min(times for (where, passes), times in steps.items()
                                         if where == "H200" and passes != compiled)
    assert peaks[compiled] == min(peaks.values())


def test_the_cpu_set_the_pace_of_the_recorded_steps() -> None:
    """The GPU computes equally long in each run without passes, and longer with checkpointing."""
    name, mesh = RUNS["1B model, 4 H200"]
    runs = [run for run in json_lines(results_dir() / f"{name}.jsonl") if mesh.items() <= run["recipe"]["mesh"].items()]
    none, tour, repeated = ([run for run in runs if run["variant"] == variant]
                            for variant in ("llama3", "tour", "llama3_checkpointing"))
    assert all(abs(run["enqueue_ms"] / run["step_ms"] - 1) < 0.03 for run in none + tour)
    busy = [run["kernels_ms"] for run in none]
    assert max(busy) - min(busy) < 2 and max(busy) < 0.6 * min(run["step_ms"] for run in none)
    assert repeated[0]["kernels_ms"] > 1.1 * max(busy)


def test_products_have_much_of_the_rise_under_bucketing() -> None:
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in json_lines(results_dir() / "llama3_1b_h200x4.jsonl"):
        runs.setdefault(run["variant"], []).append(run)
    for name, least, most in (("llama3", 0.5, 1.0), ("llama3_checkpointing", 0.28, 0.38)):
        for bucketed in runs[f"{name}_block_bucketing"]:
            for plain in runs[name]:
                rise = bucketed["kernels_ms"] - plain["kernels_ms"]
                assert rise > 10
                assert least < (slowest_products(bucketed) - slowest_products(plain)) / rise < most


@pytest.mark.parametrize(("collectives", "saved", "score", "said"), [
    (29, 118_656, 0.5, "29 collectives, 27 allowed: the backward repeats the layer's reduce-scatters; 118,656 saved b"),
    (27, 226_176, 0.5, "27 collectives, 27 allowed; 226,176 saved bytes, 169,632 allowed"),
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
    (0.0, 2.0, [], 2 / 3, "50 % wanted"),
    (0.0001, 49.9999999, [], 1.0, "wrong by 50 % of its norm"), (float("nan"), 100.0, [], 2 / 3, "nan %"),
])
def test_an_unnoticed_pass_scores_each_condition(loss: float, gradient: float, failed: list[str], score: float,
                                                 said: str) -> None:
    given = {"loss": loss, "first loss": 0.0, "gradient": gradient, "failed": failed}
    found = unnoticed(given)
    assert found[0] == pytest.approx(score) and said in found[1]
    assert "change only what follows `# backward`" in unnoticed(given | {"loss": 0.067, "first loss": 0.013})[1]
    assert unnoticed({"stopped": "no"}) == (0.0, "the run stopped: no")
    assert unnoticed(None) == unnoticed({"loss": "0"}) == (0.0, "give the figures of a run")
    missing = "give a number for each of collectives, saved bytes"
    assert saves_less("4", most=MOST)[:2] == (0.0, missing)
