"""Plans: patterns, what tensor parallelism cuts, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from workbench.authoring.plans import AuthoringError, ParallelPlan, expand_units
from workbench.authoring.tensor_parallel import apply_tensor_plan
from workbench.world.fake import fake_world

PATHS = ["", "embed", "layers", "layers.0", "layers.1", "layers.1.mlp", "norm", "output"]


def test_units_expand_in_forward_order_and_one_that_matches_nothing_is_named():
    plan = ParallelPlan(units=("embed", "layers.*", ("norm", "output")))
    assert expand_units(plan, PATHS) == ["embed", "layers.0", "layers.1", ["norm", "output"]]
    with pytest.raises(AuthoringError, match=r"unit 'blocks\.\*' matches no module; modules are embed, layers"):
        expand_units(ParallelPlan(units=("blocks.*",)), PATHS)


@pytest.fixture(scope="module")
def mesh():
    with fake_world(2) as world:
        yield world.mesh_of({"tp": 2})


def two_layers(width: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))


def test_a_plan_cuts_what_it_names(mesh):
    module = apply_tensor_plan(two_layers(6), ParallelPlan({"0": "colwise", "1": "rowwise"}), mesh)
    assert [parameter.placements for parameter in module.parameters()] == [
        (Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)]


REFUSED: list[tuple[dict, str]] = [
    ({"2": "colwise"}, "plan: tensor '2' matches no module; modules are 0, 1"),
    ({"1": "rowwise"}, "mesh.tp 2 does not divide 1.in_features 5: 5 / 2 leaves 1"),
    ({"": "columns"}, "plan: tensor '': unknown style 'columns'; styles are colwise, rowwise, sequence, inputs, "
                      "outputs, vocabulary, everywhere"),
    ({"": {"style": "outputs", "output": "shard"}},
     "plan: tensor '': placement 'shard' is not \"replicate\", \"partial\" or \"shard(dim)\""),
    ({"": {"style": "sequence", "axis": 1}},
     "plan: tensor '': style 'sequence' has no key 'axis'; keys are dim, local"),
]


def test_a_plan_that_does_not_fit_is_refused(mesh):
    for plan, message in REFUSED:
        with pytest.raises(AuthoringError) as error:
            apply_tensor_plan(two_layers(5), ParallelPlan(plan), mesh)
        assert str(error.value) == message
