"""What our settings around torch's partitioner change, and that torch is left as it was."""

from __future__ import annotations

import pytest
from on_ranks import FSDP_TP, small
from torch._functorch import partitioners

from workbench.authoring.author import author
from workbench.graph.capture import capture
from workbench.pipeline.run_passes import run_joint
from workbench.torch_api import partitioning
from workbench.world.fake import fake_world


def patched():
    return partitioners.has_recomputable_rng_ops, partitioners.classify_nodes


as_torch_does = patched()


@pytest.fixture(scope="module")
def joint():
    recipe = small(FSDP_TP, ("activation_checkpointing", "reshard_after_forward"))
    with fake_world(4) as world:
        joint = capture(author(recipe, world))
        run_joint(joint, recipe.joint_passes)
        yield joint


def test_torch_is_left_as_it_was():
    with partitioning.settings():
        assert partitioners.has_recomputable_rng_ops is partitioning.recomputes_draws
        assert partitioners.classify_nodes is not as_torch_does[1]
    assert patched() == as_torch_does


def test_an_alias_may_be_computed_again_and_a_detach_may_not(joint):
    found = {str(n.target): partitioning.repeatable(n) for n in joint.graph.graph.nodes if n.op == "call_function"}
    assert not found["aten.detach.default"] and not found["aten.mm.default"]
    assert found["aten.mul.Tensor"] and found["aten.view.default"]
