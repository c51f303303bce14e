"""Recipes on a traced capture, each in a world of its own."""

import pytest
from on_ranks import small, user_pass

from workbench import WorkbenchError, build, fake_world
from workbench.authoring.models import llama3
from workbench.graph.read.nodes import module_path
from workbench.pipeline.build import check_buildable
from workbench.recipe.recipe import RecipeError
from workbench.torch_api.inductor.regions import region_of
from workbench_lessons.l17_two_captures.compare import compare_captures


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
    assert found.refused["joint"].startswith("model Prints of recipe 'small': it cannot be captured at test_recipes")
    assert found.refused["joint"].endswith('or try capture "traced"')


def test_a_pass_that_needs_the_partitioner_is_refused_on_a_traced_capture():
    late = small({"dp_shard": 2}, ("own",)).override({"capture": "traced"})
    with user_pass("own", lambda gm: gm, needs={"partitioner"}):
        with pytest.raises(RecipeError) as told:
            small({"dp_shard": 2}, ("own",)).override({"capture": "traced"})
        with pytest.raises(WorkbenchError, match="pass 'own' needs torch's partitioner"):
            check_buildable(late, "fake")
    assert str(told.value).endswith("capture: pass 'own' needs torch's partitioner, and capture is \"traced\", which "
                                    'has none: set it to "joint", or drop the pass')


@pytest.mark.compat
def test_a_traced_backward_has_the_forward_s_regions_and_modules():
    """torch 2.11 took all of it for gradient accumulation, and FlexAttention's backward ran uncompiled."""
    recipe = small({"dp_shard": 2}).override({"model.attention": "flex", "capture": "traced"})
    with fake_world(2) as world:
        nodes = {n.name: n for n in build(recipe, world).captured.graph.nodes}
    regions = {"flex_attention_backward": "flex_attention", "silu_backward": "feed_forward", "nll_loss_backward": None}
    assert {name: region_of(nodes[name]) for name in regions} == regions
    assert module_path(nodes["silu_backward"]) == "layers.0.feed_forward"
