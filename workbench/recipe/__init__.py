"""Recipes: the declaration of a run. Nothing here imports torch.

    arguments    arguments that commands share
    contracts    PassContract, Options, Stage, Numerics
    edits        change a recipe by dotted key
    files        read users' files, write whole ones
    hooks        what the core calls by name, and a plugin has
    listings     recipes and passes as text
    model_sizes  sizes of each family's flavors
    plugins      the door for other packages: passes and commands
    public_names  what a package of declarations lends, imported on use
    recipe       Recipe: read, list, compare
    rules        rules that span sections
    sections     model, mesh, data, passes, training, expectations
    strict_toml  strict reading of TOML, with all problems at once
    wording      counts, first lines and JSON in messages
"""
