"""Measured memory budgets beside their estimates: what lesson 03 draws from committed results."""

from __future__ import annotations

import json

import pytest

from workbench.notebook.lessons import budgets
from workbench.notebook.lessons.budgets import draw_budgets, measured_budgets


def test_all_measured_steps_are_there_with_their_estimates() -> None:
    found = measured_budgets()
    assert found[0].name == "no budget" and found[0].longer == 0 and found[0].estimated is None
    assert [each.gib for each in found] == sorted((each.gib for each in found), reverse=True)
    planned = [each for each in found if each.estimated is not None]
    assert found[-1].regathers
    assert len(planned) >= 4 and all(each.name.endswith(" GiB") for each in planned)
    assert {each.regathers for each in planned} == {True, False}
    assert found[-1].name == "full checkpointing" and found[-1].estimated is None


def test_estimates_are_near_what_was_measured() -> None:
    """As lesson 03 says: of plans alone, whose weights stay gathered."""
    for each in measured_budgets():
        if each.estimated is not None and not each.regathers:
            assert each.estimated == pytest.approx(each.longer, abs=1.5)


def test_the_text_has_each_measured_step() -> None:
    text = str(draw_budgets())
    assert all(f"{each.longer:.1f} ms longer" in text for each in measured_budgets())


def test_the_estimates_are_of_the_measured_variants() -> None:
    rows = json.loads((budgets.results_dir() / budgets.ESTIMATED).read_text())["rows"]
    assert {row["variant"] for row in rows} == {
        line["variant"] for line in map(json.loads, (budgets.results_dir() / budgets.MEASURED).read_text().splitlines())
        if "_budget_" in line["variant"]}
