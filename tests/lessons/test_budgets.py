"""Measured memory budgets beside their estimates: what lesson 03 draws from committed results."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from workbench_lessons.l03_split_forward_and_backward import budgets
from workbench_lessons.l03_split_forward_and_backward.budgets import budget_table, draw_budgets, measured_budgets


def test_all_measured_steps_are_there_with_their_estimates() -> None:
    found = measured_budgets()
    assert found[0].name == "no budget" and found[0].longer == 0 and found[0].estimated is None
    assert [each.gib for each in found] == sorted((each.gib for each in found), reverse=True)
    planned = [each for each in found if each.estimated is not None]
    assert found[-1].regathers
    assert len(planned) >= 4 and all(each.name.endswith(" GiB") for each in planned)
    assert {each.regathers for each in planned} == {True, False}
    assert found[-1].name == "full checkpointing" and found[-1].estimated is None


def test_estimates_are_as_low_as_lesson_03_says() -> None:
    """Slightly where the weights stay gathered; without their price where they are gathered again.

    That price is a third of the jump of the lesson's other table, in a step that is longer.
    """
    planned = [each for each in measured_budgets() if each.estimated is not None]
    missing = {regathers: [each.longer - each.estimated for each in planned if each.regathers == regathers]
               for regathers in (False, True)}
    assert all(0 < ms < 1 for ms in missing[False]) and all(4 < ms < 5 for ms in missing[True])
    kept, again = ([each for each in planned if each.name == "7.0 GiB" and each.regathers == regathers]
                   for regathers in (False, True))
    assert again[0].longer < kept[0].longer
    steps = [mean(each.rounds) for each in planned if each.regathers]
    assert steps == [pytest.approx(117, abs=0.5), pytest.approx(123, abs=0.5)]


def test_the_cuts_on_gpus_are_as_lesson_03_says() -> None:
    course = budgets.results_dir() / "course" / "03_split_forward_and_backward.json"
    rows = json.loads(course.read_text(encoding="utf-8"))["memory"]["rows"]
    saved, peak, step = ([row[name] for row in rows] for name in ("saved MiB", "peak MiB", "step ms"))
    assert all(abs((saved[0] - a) - (peak[0] - b)) <= 2 for a, b in zip(saved, peak, strict=True))
    assert step[1] - step[0] == 15 and step[2] <= step[1] and peak[2] < 0.75 * peak[0]


def test_full_checkpointing_is_as_lesson_03_says() -> None:
    """Less than half of the peak for a fifth of the step; less of both than the left end of the line.

    A plan at 5.0 GiB costs less than half of that.
    """
    first, *_, last = measured_budgets()
    end = json.loads((budgets.results_dir() / budgets.ESTIMATED).read_text())["front"][-1]
    assert last.peak < 0.5 * first.peak
    assert last.longer / mean(first.rounds) == pytest.approx(0.2, abs=0.03)
    assert next(each for each in measured_budgets() if each.name == "5.0 GiB").longer < 0.5 * last.longer
    assert last.gib < end["bytes"] / budgets.GIB and last.longer < end["ms"]


def test_the_table_has_each_measured_step_and_where_it_ran() -> None:
    text = str(budget_table())
    assert "111.5, 111.8" in text and "recorded on 2 NVIDIA H200, torch" in text
    assert all(f"{each.longer:.1f}" in text and f"{each.peak:.1f}" in text for each in measured_budgets())


def test_the_text_has_each_measured_step() -> None:
    text = str(draw_budgets())
    assert all(f"{each.longer:.1f} ms longer" in text for each in measured_budgets())


def test_the_estimates_are_of_the_measured_variants() -> None:
    rows = json.loads((budgets.results_dir() / budgets.ESTIMATED).read_text())["rows"]
    assert {row["variant"] for row in rows} == {
        line["variant"] for line in map(json.loads, (budgets.results_dir() / budgets.MEASURED).read_text().splitlines())
        if "_budget_" in line["variant"]}
