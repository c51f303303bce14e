"""Tensors on the float8 grid: what is rounded to 0 is counted as torch rounds it; curves keep their lengths."""

import torch

from workbench.notebook.draw.float8 import ZERO, curves, float8_grid


def test_the_grid_counts_what_becomes_0():
    x = torch.tensor([ZERO, -ZERO, ZERO * 1.01, -1.0, 448.0, 0.0])
    found = float8_grid({"as it is": x, "scaled": x * 0.5})
    assert found.text.splitlines() == ["as it is: 2 of 5 become 0", "scaled: 3 of 5 become 0"]
    assert found.png.startswith(b"\x89PNG") and "2 of 5 become 0; scaled" in found.alt


def test_a_tensor_of_zeros_has_nothing_to_lose():
    assert float8_grid({"zeros": torch.zeros(3)}).text == "zeros: 0 of 0 become 0"


def test_curves_say_how_many_steps_each_run_has():
    assert curves({"a": [3.0, 2.0], "b": [3.0]}, "two runs").text == "two runs: a, 2 steps; b, 1 steps"
