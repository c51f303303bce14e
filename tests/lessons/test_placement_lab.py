"""The lab's tables are DTensor's own answers, and the least cost is found by hand too."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from workbench import WorkbenchError, simulated_world
from workbench_lessons.course.grading import grade
from workbench_lessons.l01_author_with_dtensor.placement_lab import CHOICES, PlacementLab
from workbench_lessons.l01_author_with_dtensor.redistribution import redistribution

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def lab():
    return PlacementLab()


def test_all_placements_of_two_factors_over_two_axes_are_there(lab):
    assert len(lab.table) == 3 ** 4
    fits = lab.table["rows", "replicate", "replicate", "columns"]
    assert fits["added"] == [] and fits["result"] == ["S(0)", "S(1)"] and fits["summed"] == []
    # x gathers its columns over tp, w its rows over dp_shard: half of each, which two ranks share, becomes whole
    assert fits["x"] == ["all-gather over tp, 32,768 B in, 65,536 B out"]
    assert fits["bytes"] == 128 * 128 * 4 + 128 * 256 * 4


@pytest.mark.parametrize("key", [("rows", "columns", "rows", "columns"), ("columns", "rows", "rows", "replicate")])
def test_ranks_with_values_launch_as_many_and_get_the_product(lab, key):
    with simulated_world(4) as world:
        mesh = world.mesh_of({"dp_shard": 2, "tp": 2})
        factors = []
        for shape, places in (((256, 128), key[:2]), ((128, 512), key[2:])):
            factors.append(distribute_tensor(torch.ones(shape), mesh, [CHOICES[place] for place in places]))
        with CommDebugMode() as seen:
            result = factors[0] @ factors[1]
        assert seen.get_total_counts() == len(lab.table[key]["added"])
        assert [str(each) for each in result.placements] == lab.table[key]["result"]


def test_the_grader_takes_placements_that_fit_at_the_least_bytes(lab):
    def placed(answer):
        return grade("workbench_lessons.l01_author_with_dtensor.placement_lab:placed", answer, {"lab": lab})[:2]

    best = dict(x_0="rows", x_1="replicate", w_0="replicate", w_1="columns")
    dear = dict.fromkeys(best, "replicate")
    assert placed(best) == (1.0, "every target met")
    assert placed(dear)[0] < 1 and "cost in bytes" in placed(dear)[1]
    assert placed(lab)[0] == 0 and placed(lab)[1].startswith("the placements do not fit: DTensor adds ")
    assert placed({**best, "x_0": "diagonal"}) == (0.0, "x_0: 'diagonal' is none of replicate, rows, columns")
    assert placed(3) == (0.0, "give the board, or a placement for each of x_0, x_1, w_0, w_1")
    for name, value in best.items():
        setattr(lab, name, value)
    assert placed(lab) == (1.0, "every target met")


def test_factors_that_do_not_multiply_and_placements_for_other_axes_are_refused():
    with pytest.raises(WorkbenchError, match=r"x \[4, 8\] @ w \[4, 8\] on .*as many columns of x as w has rows"):
        PlacementLab((4, 8), (4, 8))
    with simulated_world(2) as world:
        cut = DTensor.from_local(torch.ones(4, 2), world.mesh_of({"tp": 2}), [Replicate()], run_check=False)
        with pytest.raises(WorkbenchError, match="2 placements for a mesh of 1 axes: give one for each"):
            redistribution(cut, [Replicate(), Replicate()])
