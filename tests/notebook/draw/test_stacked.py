"""Bars made of parts: their text has the same numbers."""

from __future__ import annotations

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook import draw


def test_parts_of_bars_are_told():
    rows = {"x": {"products": 1.25, "idle": 2}, "y": {"products": 0, "idle": 1}}
    assert draw.stacked(rows, line=("limit", 3)).png != draw.stacked(rows).png
    assert draw.stacked(rows).text == "x: products 1.2, idle 2.0\ny: products 0.0, idle 1.0"


@pytest.mark.parametrize("nothing", [{}, {"x": {"a": 1}, "y": {"b": 1}}])
def test_nothing_to_draw_is_refused(nothing):
    with pytest.raises(WorkbenchError, match="give one"):
        draw.stacked(nothing)
