"""What the benchmarks compute from a measured run, and what they refuse to take for one."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.step_time import covered, finite, kernel_times


def test_a_run_whose_loss_is_no_number_measures_nothing():
    assert finite([1.5, 0.25]) == ["0x1.8000000000000p+0", "0x1.0000000000000p-2"]
    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        finite([1.5, math.nan, math.inf])


def test_time_under_overlapping_spans_counts_once():
    assert covered([(0, 4), (2, 5), (8, 9), (8.5, 8.75)]) == 6


def test_exposed_is_what_no_compute_kernel_covers():
    spans = [("matmul", 0, 4000), ("ncclAllGather", 3000, 6000), ("add", 5500, 7000), ("ncclReduce", 1000, 2000)]
    assert kernel_times(spans) == {"kernels_ms": 5.5, "nccl_ms": 4.0, "exposed_nccl_ms": 1.5}
