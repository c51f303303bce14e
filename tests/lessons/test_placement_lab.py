"""The lab's tables are DTensor's own answers, and the least cost is found by hand too."""

from __future__ import annotations

import pytest
import torch
import traitlets
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from workbench import WorkbenchError, simulated_world
from workbench_lessons.l01_author_with_dtensor.placement_lab import CHOICES, PlacementLab

pytestmark = pytest.mark.integration
FLOAT = 4


@pytest.fixture(scope="module")
def made():
    return PlacementLab()


@pytest.fixture
def lab(made):
    made.x_0, made.x_1, made.w_0, made.w_1 = "rows", "columns", "rows", "columns"
    return made


def test_all_placements_of_two_factors_over_two_axes_are_there(lab):
    assert len(lab.table) == 3 ** 4
    fits = lab.table["rows", "replicate", "replicate", "columns"]
    assert fits["added"] == [] and fits["result"] == ["S(0)", "S(1)"] and fits["summed"] == []
    # x gathers its columns over tp, w its rows over dp_shard: half of each, which two ranks share, becomes whole
    assert fits["x"] == [f"all-gather over tp, {64 * 128 * FLOAT * 1:,} B in, {128 * 128 * FLOAT:,} B out"]
    assert fits["bytes"] == 128 * 128 * FLOAT + 128 * 256 * FLOAT == lab.table["rows", "replicate", "replicate",
                                                                                 "columns"]["bytes"]


@pytest.mark.parametrize("key", [("rows", "columns", "rows", "columns"), ("columns", "rows", "rows", "replicate")])
def test_ranks_with_values_launch_as_many_and_get_the_product(lab, key):
    torch.manual_seed(0)
    whole = torch.randn(256, 128), torch.randn(128, 512)
    with simulated_world(4) as world:
        mesh = world.mesh_of({"dp_shard": 2, "tp": 2})
        factors = [DTensor.from_local(each, mesh, [Replicate()] * 2, run_check=False).redistribute(
            placements=[CHOICES[place] for place in places]) for each, places in zip(whole, (key[:2], key[2:]),
                                                                                      strict=True)]
        with CommDebugMode() as seen:
            result = factors[0] @ factors[1]
        assert seen.get_total_counts() == len(lab.table[key]["added"])
        assert [str(each) for each in result.placements] == lab.table[key]["result"]


def test_controls_follow(lab):
    dropdowns = {each.description: each for each in lab.panel.children[0].children}
    dropdowns["x: tp"].value = "rows"
    assert lab.x_1 == "rows"
    with pytest.raises(traitlets.TraitError, match="x_0"):
        lab.x_0 = "diagonal"


def test_factors_that_do_not_multiply_are_refused():
    with pytest.raises(WorkbenchError, match=r"x \[4, 8\] @ w \[4, 8\] on .*as many columns of x as w has rows"):
        PlacementLab((4, 8), (4, 8))
