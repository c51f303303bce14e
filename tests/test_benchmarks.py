"""What the benchmarks refuse to take for a measured run."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.step_time import finite


def test_a_run_whose_loss_is_no_number_measures_nothing():
    assert finite([1.5, 0.25]) == ["0x1.8000000000000p+0", "0x1.0000000000000p-2"]
    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        finite([1.5, math.nan, math.inf])
