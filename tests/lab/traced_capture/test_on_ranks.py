"""Recipes whose step make_fx captures, on real ranks: bitwise what the joint capture trains."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from on_ranks import calls, insert, small, user_pass

from workbench import WorkbenchError, build, current_world, fake_world, train
from workbench.authoring.models import llama3
from workbench.graph.read.nodes import module_path
from workbench.pipeline.build import check_buildable
from workbench.pipeline.progress import Post
from workbench.recipe.recipe import RecipeError, load_recipe
from workbench.torch_api.inductor.regions import region_of
from workbench_lessons.l17_two_captures.compare import compare_captures, on_rank

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BLOCKS = "transformer_block_bucketing"
EXPERTS = load_recipe("deepseek_v3").override({
    "model.n_layers": 2, "data.seq_len": 16, "training.steps": 5, "mesh": {"dp_shard": 2, "ep": 2}, "passes": []})
MEMORY = ({"name": "activation_checkpointing", "policy": "selective"}, "reshard_after_forward")


def pairs(recipe):
    """Names of what training leaves other than behind the joint capture, both losses, and both builds' verdicts."""
    left, losses = [], []
    for how in ("joint", "traced"):
        built = build(recipe.override({"capture": how}), current_world(), level="full")
        losses.append(train(built.authored, built.step).losses)
        module = built.authored.module
        named = [*module.named_parameters(), *module.named_buffers()]
        left.append({name: getattr(v, "_local_tensor", v).detach().clone() for name, v in named})
        found = [(r.name, v.check, str(v.outcome)) for r in built.records for v in r.verdicts]
        found += [(v.check, str(v.outcome)) for v in built.pipeline]
    return [name for name in left[0] if not torch.equal(left[0][name], left[1][name])], losses, found


# quick: test_compare_captures_on_ranks
@pytest.mark.parametrize("recipe", [
    pytest.param(small({"dp_shard": 2}, MEMORY, (BLOCKS,)), id="dp_shard 2", marks=pytest.mark.nightly),
    pytest.param(small({"tp": 2}), id="tp 2", marks=pytest.mark.nightly),
    pytest.param(EXPERTS, id="experts, dropless", marks=pytest.mark.nightly),
    pytest.param(EXPERTS.override({"model.dispatch": "capacity", "passes": [BLOCKS]}), id="experts, capacity",
                 marks=pytest.mark.nightly),
])
def test_training_is_bitwise_that_of_the_joint_capture(pool2, recipe):
    for odd, losses, verdicts in pool2.run(pairs, recipe):
        assert odd == [] and losses[0] == losses[1]
        assert ("numerics", "PASS") in verdicts and {outcome for *_, outcome in verdicts} == {"PASS"}


def test_compare_captures_on_ranks(pool2):
    found = compare_captures(small({"dp_shard": 2}, MEMORY), world=pool2, progress=False)
    assert found.refused == {} and found.verdicts == {"joint": "PASS", "traced": "PASS"}
    assert found.values.outcome == "PASS" and "bitwise the same after 3 steps on 2 ranks" in found.values.message
    assert found.aligned > 300 and "metadata lost" in {each.kind for each in found.differences}


def halved(gm):
    """Halves a product of a traced graph, whose inputs are parameters and no components of them."""
    if not any("Subclass" in type(n.meta["desc"]).__name__ for n in gm.graph.find_nodes(op="placeholder")):
        node = calls(gm, "aten.mm")[0]
        half = insert(gm, node, torch.ops.aten.mul.Tensor, node, 0.5)
        node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    return gm


def compared_with(recipe, edit):
    with user_pass("own", edit):
        return on_rank(recipe.override({"joint_passes": ["own"]}), Post(None))


@pytest.mark.nightly
def test_values_that_differ_are_a_failure(pool2):
    for found in pool2.run(compared_with, small({"dp_shard": 2}), halved):
        assert found.values.outcome == "FAIL" and "outputs break 'exact'" in found.values.message


class Prints(llama3.Llama3):
    """Prints its last loss, which Dynamo cannot read and a traced step runs once."""

    def forward(self, tokens, targets):
        print("forward", list(tokens.shape))
        return super().forward(tokens, targets)


def test_a_recipe_that_one_capture_refuses_is_told_with_its_reason(monkeypatch):
    monkeypatch.setattr(llama3, "Llama3", Prints)
    recipe = small({"dp_shard": 4})
    found = compare_captures(recipe, world="fake", progress=False)
    assert set(found.refused) == {"joint"} and found.values.outcome == "UNKNOWN"
    assert found.refused["joint"].startswith("model Prints of recipe 'small': it cannot be captured at test_on_ranks")
    assert found.refused["joint"].endswith('or try capture "traced"')
    assert "joint is refused: model Prints" in str(found)


def test_a_pass_that_needs_the_partitioner_is_refused_on_a_traced_capture():
    with user_pass("own", lambda gm: gm, needs={"partitioner"}):
        recipe = small({"dp_shard": 2}, ("own",))
        with pytest.raises(RecipeError) as told:
            recipe.override({"capture": "traced"})
    assert str(told.value).endswith("capture: pass 'own' needs torch's partitioner, and capture is \"traced\", which "
                                    'has none: set it to "joint", or drop the pass')
    late = small({"dp_shard": 2}, ("own",)).override({"capture": "traced"})
    with (user_pass("own", lambda gm: gm, needs={"partitioner"}),
          pytest.raises(WorkbenchError, match="pass 'own' needs torch's partitioner")):
        check_buildable(late, "fake")


@pytest.mark.compat
def test_a_traced_backward_has_the_forward_s_regions_and_modules():
    """torch 2.11 took all of it for gradient accumulation, and FlexAttention's backward ran uncompiled."""
    recipe = small({"dp_shard": 2}).override({"model.attention": "flex", "capture": "traced"})
    with fake_world(2) as world:
        nodes = {n.name: n for n in build(recipe, world).captured.graph.nodes}
    regions = {"flex_attention_backward": "flex_attention", "silu_backward": "feed_forward", "nll_loss_backward": None}
    assert {name: region_of(nodes[name]) for name in regions} == regions
    assert module_path(nodes["silu_backward"]) == "layers.0.feed_forward"
