"""A recipe with a `[pipeline]`: what it says, what is refused before anything is captured, and a run without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lab.pipeline.pipelines import piped, small
from workbench import WorkbenchError, build, fake_world, load_recipe, register_model
from workbench.lab.pipeline.run import run_pipeline
from workbench.recipe.recipe import RecipeError, parse_recipe


def test_a_recipe_says_its_stages_and_runs_on_a_multiple_of_its_mesh():
    recipe = piped(["layers.1"], **{"mesh.dp_shard": 2})
    assert (recipe.pipeline.count, recipe.world_size, recipe.mesh.world_size) == (2, 4, 2)
    assert piped(4, "ZBVZeroBubble").world_size == piped(8, "DualPipeV", 8, **{"pipeline.ranks": 4}).world_size / 2 == 2
    assert parse_recipe(recipe.to_dict(), "again") == recipe and "[pipeline]" in recipe.to_toml()
    assert small().world_size == 1 and "pipeline" not in small().to_toml()


@pytest.mark.parametrize(("changes", "told"), [
    ({"pipeline.microbatches": 3}, "pipeline.microbatches: 3 do not divide data.batch_per_rank 4: change one of them"),
    ({"pipeline.stages": 5}, "pipeline.stages: 5 are more than the model's 4 blocks"),
    ({"training.step": "whole"}, 'pipeline: it is a kind of step, and training.step is "whole": set it to "pipeline"'),
    ({"passes": ["full_inductor_compilation"], "joint_passes": ["inductor_decomposition"]},
     "pipeline.stages: no stage can be cut from what pass 'full_inductor_compilation' makes: drop one"),
    ({"training.accumulate": 2}, "2 microbatches have their gradients added up outside any graph, and training.step is "
                                 '"pipeline"'),
])
def test_what_does_not_fit_the_rest_of_the_recipe_is_refused(changes, told):
    with pytest.raises(RecipeError) as error:
        piped(["layers.1"]).override(changes)
    assert told in str(error.value) and len(str(error.value).splitlines()) == 1


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens).flatten(0, 1))
        return nn.functional.cross_entropy(self.head(x), targets.flatten())


@pytest.mark.parametrize(("start", "told"), [
    ("layers.9", "pipeline.stages: the model has no module 'layers.9'"),
    ("head", "pipeline: batch norm 'norm' would see a microbatch: replace it"),
])
def test_modules_that_do_not_fit_are_refused_before_the_capture(start, told, monkeypatch):
    monkeypatch.setattr("workbench.lab.pipeline.run.capture", None)
    register_model("normed", sizes={"vocab_size": 16, "max_seq_len": 16})(lambda _: Normed())
    recipe = load_recipe("llama3").override({
        "model": {"family": "normed"}, "mesh.dp_shard": 1, "mesh.tp": 1, "joint_passes": [], "passes": [],
        "data.seq_len": 16, "data.batch_per_rank": 4, "training.step": "pipeline", "pipeline.stages": [start]})
    with pytest.raises(WorkbenchError) as error:
        run_pipeline(recipe, world="fake")
    assert str(error.value) == told


def test_a_schedule_that_does_not_fit_is_refused_before_a_rank_starts(monkeypatch):
    monkeypatch.setattr("workbench.lab.pipeline.run.on_ranks", None)
    recipe = piped(4).override({"pipeline.ranks": 2})
    with pytest.raises(WorkbenchError, match="^1F1B cannot deal out 4 stages to 2 ranks$"):
        run_pipeline(recipe)


def test_other_commands_say_who_runs_it():
    recipe = piped(["layers.1"])
    with fake_world(2) as world, pytest.raises(WorkbenchError) as error:
        build(recipe.override({"mesh.dp_shard": 2}), world, progress=False)
    assert str(error.value) == 'training.step is "pipeline": `workbench pipeline` runs this recipe'
    with pytest.raises(WorkbenchError) as error:
        run_pipeline(small())
    assert str(error.value) == "recipe 'llama3_fsdp' has no [pipeline]: add one, or take `workbench run`"


@pytest.mark.integration
def test_a_run_without_values_shows_the_stages_and_the_step():
    report = run_pipeline(piped(4, "ZBVZeroBubble"), world="fake")
    assert report.cut.startswith("llama3_fsdp in 4 stages") and report.numerics is None and report.losses == ()
    assert report.passes == ["stage 0, split_backward: NO_EFFECT", "stage 3, split_backward: PASS"]
    step = report.estimate
    assert repr(step).startswith("4 stages on 2 ranks, 4 microbatches: bubble ")
    assert all(size > 0 for size in step.live) and len(step.spans) == 4 * 4 + 4 * 2 * 4
