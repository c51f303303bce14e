"""Recipes: the declaration of a run. Nothing here imports torch.

    contracts    PassContract, Options, Stage, Numerics
    edits        change a recipe by dotted key
    exports      public names that load on first use
    files        read users' files, write whole ones
    listings     recipes and passes as text
    model_sizes  sizes of each family's flavors
    recipe       Recipe: read, list, compare
    rules        rules that span sections
    sections     model, mesh, data, passes, training, expectations
    strict_toml  strict reading of TOML, with all problems at once
    wording      counts, first lines and JSON in messages
"""

from typing import TYPE_CHECKING

from workbench.recipe.exports import exported

if TYPE_CHECKING:
    from workbench.recipe.contracts import CONTRACTS

__all__, __getattr__, __dir__ = exported(__name__)
