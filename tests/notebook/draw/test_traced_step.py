"""Pictures of traced steps: their text has the same numbers."""

from __future__ import annotations

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook import draw

SPANS = [("a", 7, 0, 20, 120), ("nccl b", 20, 0, 40, 180), ("b", 7, 0, 180, 280), ("c", 7, 0, 330, 400)]


def test_spans_are_compute_exposed_or_idle():
    picture = draw.spans({"four": SPANS})
    assert picture.text == "four: compute 270 µs, exposed 60 µs, idle 50 µs" and picture.text in picture.alt
    assert draw.spans({"four": SPANS[::-1]}).png == picture.png


def test_long_steps_are_in_milliseconds():
    longer = [(name, stream, 0, 100 * begin, 100 * end) for name, stream, _, begin, end in SPANS]
    assert draw.spans({"long": longer}).text == "long: compute 27.00 ms, exposed 6.00 ms, idle 5.00 ms"


def test_few_collectives_of_a_long_step_have_a_bar_each():
    """Two that follow each other without a gap are drawn apart, although the other lane has many kernels."""
    many = [("product", 7 + i % 2, 0, 10 * i, 10 * i + 9) for i in range(30)]
    apart = [("nccl a", 20, 0, 0, 100), ("nccl b", 20, 0, 100, 200)]
    assert draw.spans({"x": many + apart}).png != draw.spans({"x": [*many, ("nccl a", 20, 0, 0, 200)]}).png


def test_parts_of_bars_and_counts_of_dots_are_told():
    rows = {"x": {"products": 1.25, "idle": 2}, "y": {"products": 0, "idle": 1}}
    assert draw.stacked(rows, line=("limit", 3)).png != draw.stacked(rows).png
    assert draw.stacked(rows).text == (
        "x: products 1.2, idle 2.0\ny: products 0.0, idle 1.0")
    assert draw.dots({"x": ([1, 2, 3], [4])}).text == "x: 3 timed steps, 1 traced"


@pytest.mark.parametrize(("draws", "nothing"), [
    (draw.spans, {"x": []}), (draw.spans, {}), (draw.stacked, {}), (draw.stacked, {"x": {"a": 1}, "y": {"b": 1}}),
    (draw.dots, {}), (draw.dots, {"x": ([], [1])}),
])
def test_nothing_to_draw_is_refused(draws, nothing):
    with pytest.raises(WorkbenchError, match="give one"):
        draws(nothing)
