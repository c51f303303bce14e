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


@pytest.mark.parametrize(("draws", "nothing"), [
    (kernels_over_time, {"x": []}), (kernels_over_time, {}), (dots, {}), (dots, {"x": ([], [1])}),
])
def test_nothing_to_draw_is_refused(draws, nothing):
    with pytest.raises(WorkbenchError, match="give one"):
        draws(nothing)
