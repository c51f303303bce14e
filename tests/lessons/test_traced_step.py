"""Pictures of traced steps: their text has the same numbers."""

from __future__ import annotations

import pytest

from workbench.errors import WorkbenchError
from workbench_lessons.l14_read_your_own_trace.pictures import dots, kernels_over_time

SPANS = [("a", 7, 0, 20, 120), ("nccl b", 20, 0, 40, 180), ("b", 7, 0, 180, 280), ("c", 7, 0, 330, 400)]


def test_spans_are_compute_exposed_or_idle():
    picture = kernels_over_time({"four": SPANS})
    assert picture.text == "four: compute 270 µs, exposed 60 µs, idle 50 µs" and picture.text in picture.alt
    assert kernels_over_time({"four": SPANS[::-1]}).png == picture.png


def test_long_steps_are_in_milliseconds():
    longer = [(name, stream, 0, 100 * begin, 100 * end) for name, stream, _, begin, end in SPANS]
    assert kernels_over_time({"long": longer}).text == "long: compute 27.00 ms, exposed 6.00 ms, idle 5.00 ms"


def test_few_collectives_of_a_long_step_have_a_bar_each():
    """Two that follow each other without a gap are drawn apart, although the other lane has many kernels."""
    many = [("product", 7 + i % 2, 0, 10 * i, 10 * i + 9) for i in range(30)]
    apart = [("nccl a", 20, 0, 0, 100), ("nccl b", 20, 0, 100, 200)]
    joined = [*many, ("nccl a", 20, 0, 0, 200)]
    assert kernels_over_time({"x": many + apart}).png != kernels_over_time({"x": joined}).png


def test_counts_of_dots_are_told():
    assert dots({"x": ([1, 2, 3], [4])}).text == "x: 3 timed steps, 1 traced"


@pytest.mark.parametrize(("draws", "nothing"), [
    (kernels_over_time, {"x": []}), (kernels_over_time, {}), (dots, {}), (dots, {"x": ([], [1])}),
])
def test_nothing_to_draw_is_refused(draws, nothing):
    with pytest.raises(WorkbenchError, match="give one"):
        draws(nothing)
