"""The two clocks of a step as a picture: its text says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook import draw
from workbench.notebook.draw.launch_bound import Pace

ON = "simulated on h100, not calibrated, 5 µs a launch"
SLOW = Pace(ON, 2, 10.0, 4.0, 12.0, ((0.0, 5.0), (5.0, 10.0)), ((5.0, 7.0), (10.0, 12.0)))
FAST = Pace(ON, 1, 5.0, 8.0, 13.0, ((0.0, 5.0),), ((5.0, 13.0),))


def test_each_step_says_what_binds_it():
    picture = draw.pace({"slow": SLOW, "fast": FAST})
    assert picture.text.splitlines() == [
        "pace of a step, simulated on h100, not calibrated, 5 µs a launch",
        "slow: 2 launches, CPU 10 µs, device 4 µs of work; step 12 µs, device busy 33%: bound by launches",
        "fast: 1 launch, CPU 5 µs, device 8 µs of work; step 13 µs, device busy 62%: bound by work"]
    assert "bound by launches" in picture.alt and picture.png.startswith(b"\x89PNG")


def test_work_before_a_part_is_told_apart():
    tail = Pace(ON, 2, 1e4, 4e3, 1.2e4, ((0.0, 5e3), (5e3, 1e4)), ((5e3, 7e3), (1e4, 1.2e4)), "tail", 6e3)
    picture = draw.pace({"a": tail}, one_scale=False)
    assert picture.text.splitlines() == [
        "pace of a tail, simulated on h100, not calibrated, 5 µs a launch",
        "a: 2 launches, CPU 10.00 ms; behind the work before it the tail takes 6.00 ms, the device waits 3.00 ms of it"]
    assert picture.png != draw.pace({"a": replace(tail, before_us=5.5e3)}, one_scale=False).png


def test_nothing_to_draw_is_refused():
    with pytest.raises(WorkbenchError, match="give one step or more"):
        draw.pace({})
