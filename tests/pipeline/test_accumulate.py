"""Gradient accumulation: one update for several microbatches, in the eager loop and with a compiled pair."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from on_ranks import small

from workbench.authoring.author import author
from workbench.authoring.microbatches import cut
from workbench.errors import WorkbenchError
from workbench.pipeline.build import build
from workbench.pipeline.run import run
from workbench.pipeline.train import train
from workbench.recipe.recipe import RecipeError, load_recipe
from workbench.world.mesh import World, current_world

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ALONE = World("gloo", 1, 0, torch.device("cpu"))
TWO = {"training.accumulate": 2, "data.batch_per_rank": 4}


def accumulating(mesh, **changes):
    return small(mesh).override({**TWO, **changes})


def left(recipe, compiled, world=None):
    """Losses, norms and parameters after training, and the copies of tokens that the first step routed."""
    built = build(recipe, world or current_world()) if compiled else None
    authored = built.authored if compiled else author(recipe, world or current_world())
    seen = train(authored, built.step if compiled else None)
    routed = seen.load.copies(0) if seen.load else None
    parameters = [getattr(p, "_local_tensor", p).tolist() for p in authored.module.parameters()]
    return seen.losses, seen.norms, parameters, routed


def test_a_compiled_pair_accumulates_as_the_eager_loop_does(pool2):
    recipe = accumulating({"dp_shard": 2})
    assert pool2.run(left, recipe, True) == pool2.run(left, recipe, False)


def test_two_microbatches_train_as_one_batch_of_both():
    """The mean of the microbatches' mean losses is the mean over the batch, up to the order of additions."""
    two, one = (left(accumulating({}, **{"training.accumulate": count}), True, ALONE) for count in (2, 1))
    assert two[0] == pytest.approx(one[0], rel=1e-5) and two[1] == pytest.approx(one[1], rel=1e-4)
    assert two[0] != left(accumulating({}, **{"data.batch_per_rank": 2, "training.accumulate": 1}), True, ALONE)[0]


def test_the_load_of_experts_is_that_of_all_microbatches(pool2):
    recipe = load_recipe("deepseek_v3").override({
        "model.n_layers": 2, "data.seq_len": 16, "mesh": {"dp_shard": 2, "ep": 2}, "passes": [], "training.steps": 1,
        **TWO})
    sizes = recipe.model.sizes()
    wanted = (sizes["n_layers"] - sizes["n_dense_layers"]) * sizes["top_k"] * 2 * 4 * 16
    assert [routed for *_, routed in pool2.run(left, recipe, False)] == [wanted] * 2


@pytest.mark.nightly
def test_level_full_compares_one_microbatch(pool2):
    report = run(accumulating({"dp_shard": 2}, joint_passes=["inductor_decomposition"],
                              passes=["full_inductor_compilation"]), world=pool2, level="full", progress=False)
    assert report.ok and [str(v.outcome) for v in report.pipeline] == ["PASS"]


WHOLE = ("training.accumulate: 2 microbatches have their gradients added up outside any graph, and training.step is "
         '"whole": set it to "pair", or accumulate to 1')
REPLAYED = ("passes[0]: pass 'cudagraph' writes over the gradients of the microbatch before, and training.accumulate "
            "is 2: set it to 1, or drop the pass")


@pytest.mark.parametrize(("changes", "message"), [
    ({"data.batch_per_rank": 3}, "training.accumulate: data.batch_per_rank 3 does not divide by training.accumulate 2: "
                                 "change one of them"),
    ({"training.step": "whole"}, WHOLE), ({"passes": ["cudagraph"]}, REPLAYED),
])
def test_a_recipe_names_what_cannot_accumulate(changes, message):
    with pytest.raises(RecipeError) as told:
        accumulating({"dp_shard": 2}, **changes)
    assert str(told.value).endswith(message)


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(WorkbenchError, match=r"input 1 of the step is \[3, 2\], and 2 microbatches need a tensor"):
        cut((torch.zeros(4), torch.zeros(3, 2)), 2)
