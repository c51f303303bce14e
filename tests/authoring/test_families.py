"""A model that a user registers: its sizes come from the recipe, and what does not fit is refused."""

import pytest
from torch import nn

from workbench import Recipe, WorkbenchError, author, fake_world, load_recipe, register_model
from workbench.authoring import families
from workbench.recipe.recipe import RecipeError

SIZES = {"vocab_size": 256, "max_seq_len": 128, "n_layers": 2}


def stacked(**sizes: int) -> None:
    """As a notebook's cell would; run twice, it replaces."""

    @register_model("stacked", sizes=SIZES | sizes)
    def make(sizes):
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(sizes["n_layers"])))


def recipe(**sizes: object) -> Recipe:
    changes = {f"model.{name}": size for name, size in sizes.items()}
    return load_recipe("llama3_fsdp").override(
        {"mesh.dp_shard": 1, "model.family": "stacked", "data.seq_len": 16, **changes}
    )


def test_sizes_of_the_recipe_reach_the_model_and_a_cell_run_again_replaces_it():
    def layers(**sizes: int) -> int:
        with fake_world(1) as world:
            return len(author(recipe(**sizes), world).module)

    stacked()
    assert layers() == 2 and layers(n_layers=3) == 3
    stacked(n_layers=1, n_experts=4)  # a size that our own models have rules for
    assert layers() == 1


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match="unknown family 'stacked': one of llama3, deepseek_v3, or register it with"):
        recipe()
    with pytest.raises(WorkbenchError, match="model 'mine': sizes has no max_seq_len"):
        register_model("mine", sizes={"vocab_size": 8})
    with pytest.raises(WorkbenchError, match="'llama3' is the package's own family"):
        register_model("llama3", sizes={"vocab_size": 8, "max_seq_len": 8})
    stacked()
    with pytest.raises(RecipeError, match="data.seq_len: 16 is more than model.max_seq_len 8"):
        recipe(max_seq_len=8)
    with pytest.raises(RecipeError, match="stacked has no n_heads"):
        recipe(n_heads=8)
    made = recipe()
    del families._FAMILIES["stacked"]
    with pytest.raises(WorkbenchError, match="no model family 'stacked' here: register it"):
        families.find_family(made.model.family)
