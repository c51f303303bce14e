"""Measured memory budgets beside their estimates: what lesson 03 draws from committed results."""

from __future__ import annotations

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


def test_the_table_has_each_measured_step_and_where_it_ran() -> None:
    text = str(budget_table())
    assert "111.5, 111.8" in text and "recorded on 2 NVIDIA H200, torch" in text
    assert all(f"{each.longer:.1f}" in text and f"{each.peak:.1f}" in text for each in measured_budgets())


def test_the_text_has_each_measured_step() -> None:
    text = str(draw_budgets())
    assert all(f"{each.longer:.1f} ms longer" in text for each in measured_budgets())
