"""benchmarks/matrix.py and benchmarks/ablate.py: their figures, and which variants there are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.ablate import compared
from benchmarks.matrix import table

pytestmark = pytest.mark.nightly


def made(step: float, *, ok: bool = True, outcome: str = "PASS") -> dict[str, Any]:
    return {
        "ok": ok, "problems": [] if ok else ["lint: FAIL (node 3)"], "median_step_seconds": step,
        "tokens_per_second": 512 / step, "passes": [{"outcome": outcome}], "profile": None,
        "saved_bytes": 3 << 20, "schedule": {"evidence": {"collectives": 12}},
        "training": {"peak_bytes": None}, "machine": {"gpus": [], "cpu": "A CPU"},
        "world": {"size": 2, "kind": "gloo"}, "versions": {"torch": "2.13.0"}}


def test_the_table_has_noise_bands_and_says_what_failed() -> None:
    found = {"a": [made(0.1), made(0.12)], "b": [made(0.2, outcome="NO_EFFECT"), "out of memory"],
             "c": ["pass 'cudagraph' needs CUDA"], "d": [made(0.2, ok=False)]}
    assert table(found) == (
        "recipe  verdicts       step ms    tokens/s  peak GiB  saved MiB  collectives  exposed ms\n"
        "a       PASS       110.0 ±10.0  4,693 ±427                  3.0           12\n"
        "b       NO_EFFECT        200.0       2,560                  3.0           12\n"
        "d       FAIL             200.0       2,560                  3.0           12\n"
        "b: out of memory\nc: pass 'cudagraph' needs CUDA\nd: lint: FAIL (node 3)\n"
        "2 gloo ranks, torch 2.13.0, A CPU")


def test_a_difference_counts_where_the_bands_are_apart() -> None:
    base = [100.0, 110.0, 104.0]
    others = [base, [113.0, 112.0, 120.0], [130.0, 131.0, 132.0], [80.0, 81.0, 82.0], [50.0], []]
    assert [compared(steps, base) for steps in others] == [
        "", "within noise", "+27.0 ms", "-23.0 ms", "-54.0 ms, noise unknown", ""]
