"""The lab's tables are DTensor's own answers, and the least cost is found by hand too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import traitlets
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from workbench import WorkbenchError, fake_world, simulated_world
from workbench.notebook.lessons.grading import grade
from workbench.notebook.show import outputs
from workbench.torch_api.distributed.dtensor import local_shape
from workbench_lessons.l01_author_with_dtensor.placement_lab import CHOICES, PlacementLab

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


def test_a_product_of_summands_is_partial_and_has_to_be_summed(lab):
    partial = lab.table["rows", "columns", "replicate", "rows"]
    assert partial["result"] == ["S(0)", "P(sum)"] and partial["summed"][0].startswith("all-reduce over tp")
    assert partial["added"] == []


@pytest.mark.parametrize("key", [("rows", "columns", "rows", "columns"), ("columns", "rows", "rows", "replicate"),
                                 ("rows", "columns", "replicate", "rows")])
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


def test_what_is_chosen_is_graded_and_the_least_can_be_reached(lab):
    assert lab.figures["collectives DTensor adds"] > 0
    limits = {"at_most": {"cost in bytes": lab.best, "collectives DTensor adds": 0}}
    assert grade("targets", lab.figures, limits)[0] < 1
    key = next(key for key, each in lab.table.items() if each["bytes"] == lab.best and not each["added"])
    lab.x_0, lab.x_1, lab.w_0, lab.w_1 = key
    assert grade("targets", lab.figures, limits)[0] == 1
    dropdowns = {each.description: each for each in lab.panel.children[0].children}
    assert [each.value for each in dropdowns.values()] == list(key)
    dropdowns["x: tp"].value = "rows"
    assert lab.x_1 == "rows"
    with pytest.raises(traitlets.TraitError, match="x_0"):
        lab.x_0 = "diagonal"


def test_factors_that_do_not_multiply_are_refused():
    with pytest.raises(WorkbenchError, match=r"x \[4, 8\] @ w \[4, 8\] on .*as many columns of x as w has rows"):
        PlacementLab((4, 8), (4, 8))


@pytest.mark.nightly
def test_making_it_prints_no_warnings_and_leaves_logging_as_it_was():
    code = ("import logging; from workbench_lessons.l01_author_with_dtensor.placement_lab import PlacementLab\n"
            "PlacementLab(); assert logging.root.manager.disable == 0; logging.warning('seen')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "WARNING:root:seen\n"


def test_show_has_a_picture_and_little_is_saved(lab):
    picture, shown, _ = outputs(lab)
    assert "w, as given" in repr(picture) and shown is lab
    assert len(json.dumps(lab.get_state(), default=str)) < 50_000


def test_the_shard_of_a_rank_is_what_dtensor_says():
    with fake_world(4):
        assert local_shape((256, 128), (2, 2), [0, 0], [Shard(0), Shard(1)]) == (128, 64)
        assert Partial().is_partial()


def test_two_sums_may_not_fit_and_cost_too_much_as_lesson_01_says():
    sums = {("columns", "rows"), ("replicate", "rows"), ("columns", "replicate")}
    lab = PlacementLab(x=(256, 128), w=(128, 512), mesh={"dp_shard": 2, "tp": 2})
    both = [each for (x_0, x_1, w_0, w_1), each in lab.table.items() if {(x_0, w_0), (x_1, w_1)} <= sums]
    assert len(both) == 9 and sum(bool(each["added"]) for each in both) == 4
    assert min(each["bytes"] for each in both) > min(each["bytes"] for each in lab.table.values() if not each["added"])
