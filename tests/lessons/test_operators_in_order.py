"""Rows of letters: one below the other, and refused where they could not be told apart."""

from __future__ import annotations

import pytest

from workbench.errors import WorkbenchError
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import operators_in_order

KINDS = {"R": "reads", "M": "another", "U": "an update"}


def test_rows_are_one_below_the_other_and_another_order_is_another_picture():
    picture = operators_in_order({"before": ".RMU", "after the pass": ".RUM"}, KINDS)
    assert picture.text.splitlines() == ["before          .RMU", "after the pass  .RUM"]
    assert "before: .RMU; after the pass: .RUM" in picture.alt
    assert picture.png != operators_in_order({"before": ".RMU", "after the pass": ".RMU"}, KINDS).png


def test_a_line_marks_where_the_backward_begins():
    marked, plain = (operators_in_order({"a": letters}, {**KINDS, "|": "the backward"}) for letters in (".R|M", ".RM"))
    assert marked.text == "a  .R|M" and marked.png != plain.png
    assert plain.png != operators_in_order({"a": ".RM"}, KINDS).png  # its legend names the line


@pytest.mark.parametrize(("rows", "kinds"), [({}, KINDS), ({"a": "R"}, {**KINDS, "X": "one more"})])
def test_no_row_and_a_fourth_kind_are_refused(rows, kinds):
    with pytest.raises(WorkbenchError, match="give one row or more"):
        operators_in_order(rows, kinds)
