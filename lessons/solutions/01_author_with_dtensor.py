"""Answers to the checkpoints of 01_author_with_dtensor; kept apart from the notebook."""

from workbench.recipe import load_recipe


def local_shape(dp_shard: int = 2, tp: int = 2) -> int:
    """Rows of w1 on the last rank: both axes of the mesh cut the rows of its weight, where both divide them."""
    recipe = load_recipe("llama3").override({"mesh.dp_shard": dp_shard, "mesh.tp": tp})
    return int(recipe.model.sizes()["ffn_dim"]) // (dp_shard * tp)
