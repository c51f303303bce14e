"""Launches before and after a pass."""

from __future__ import annotations

import pytest

from workbench import build, fake_world, load_recipe
from workbench_lessons.l05_bucket_and_overlap.pictures import launch_bars

pytestmark = pytest.mark.integration


def test_launches_before_and_after():
    recipe = load_recipe("llama3_block_bucketing").override({"model.n_layers": 1, "mesh.tp": 2})
    with fake_world(4) as world:
        built = build(recipe, world)
    lines = launch_bars(built.records[-1]).text.splitlines()
    assert lines[0] == "launches before and after transformer_block_bucketing"
    assert "all-gather over dp_shard: 12 to 3" in lines
    assert "reduce-scatter over dp_shard: 12 to 3" in lines
