"""Capture, partition and bucketing of 32 layers take no longer than they did, against a committed row."""

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from depth import STAGES, measure, slower  # noqa: E402

BEFORE = json.loads((ROOT / "benchmarks/results/depth_gauged.json").read_text())


@pytest.mark.nightly
def test_32_layers_take_no_longer_than_they_did() -> None:
    assert slower(measure([32], repeats=1), BEFORE) == []


def test_a_slower_stage_is_named_and_a_slower_machine_is_not() -> None:
    now = copy.deepcopy(BEFORE)
    now["rows"][-1]["partition_cpu_seconds"] *= 1.6
    (found,) = slower(now, BEFORE)
    assert found.startswith("partition_cpu_seconds at 32 layers")
    twice = copy.deepcopy(BEFORE)
    twice["gauge_cpu_seconds"] *= 2
    for row in twice["rows"]:
        for stage in STAGES:
            row[stage] *= 2
    assert slower(twice, BEFORE) == []
