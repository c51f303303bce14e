"""Tensor-parallel plans: what they say, and what they refuse."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from workbench.authoring.plans import AuthoringError, ParallelPlan
from workbench.authoring.tensor_parallel import apply_tensor_plan
from workbench.recipe.sections import MeshSpec
from workbench.world.fake import fake_world


@pytest.fixture(scope="module")
def mesh():
    with fake_world(2) as world:
        yield world.mesh(MeshSpec(tp=2))


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
