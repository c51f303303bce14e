"""Export a recipe with the user's passes and model as one script for torchrun, or the passes and model as a module."""

from __future__ import annotations

from collections.abc import Collection

from workbench.authoring.families import find_family
from workbench.passes.registry import find_pass
from workbench.recipe.recipe import Recipe
from workbench.tools.export.source_code import Sources

_SCRIPT = '''\
"""{about}

    torchrun --nproc-per-node {ranks} {file}

Needs torch and torch-compiler-workbench, and is yours to change. Written by

    {command}
"""

from __future__ import annotations

import sys
import tomllib
{imports}
RECIPE = r\'\'\'
{recipe}\'\'\'
{definitions}

def tell(step: int, loss: float) -> None:
    """Print the mean loss of all ranks after a step, the first of which is 0."""
    print(f"step {{step}}: loss {{loss!r}}", flush=True)


def main() -> int:
    """Every rank builds the step and trains it; rank 0 prints the verdicts on each pass."""
    recipe = parse_recipe(tomllib.loads(RECIPE), "the recipe of this script")
    with joined(recipe) as world:
        built = build(recipe, world)
        first = world.rank == 0
        training = train(built.authored, built.step, progress=tell if first else lambda *_: None)
        report = report_here(built, training)
        if first:
            print(report.table())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
'''
_IMPORTS = ("from workbench import build, train", "from workbench.recipe.recipe import parse_recipe",
            "from workbench.pipeline.recipe_ranks import joined", "from workbench.pipeline.run import report_here")
_TAKEN = {"build", "train", "parse_recipe", "joined", "report_here", "tell", "main", "sys", "tomllib", "RECIPE"}


def export_script(recipe: Recipe, *, file: str = "train.py", command: str = "workbench.export_script") -> str:
    """The text of a Python script that trains `recipe` on the ranks that torchrun starts.

    On rank 0 it prints each step's loss and the verdicts; its exit status is 1 where a verdict failed. It contains the
    source of the user's own passes and model, and what they use of their module. file: the name in its usage line.
    command: the command that wrote it, for its docstring.

    Raises WorkbenchError, naming the pass or the model, for one that is unknown or whose source cannot be exported.
    """
    imports, definitions = _own(recipe, _TAKEN, _IMPORTS)
    return _SCRIPT.format(
        about=_plain(recipe.about or recipe.name), ranks=recipe.mesh.world_size, file=file, command=_plain(command),
        imports=imports, recipe=recipe.to_toml().replace("\'\'\'", "\\u0027\'\'"), definitions=definitions,
    )


def own_module(recipe: Recipe) -> str:
    """The text of a module that, when imported, registers the user's passes and model of `recipe`; "" without any.

    Raises WorkbenchError as `export_script` does.
    """
    imports, definitions = _own(recipe)
    return f"from __future__ import annotations\n{imports}{definitions}" if definitions else ""


def _own(recipe: Recipe, taken: Collection[str] = (), imported: Collection[str] = ()) -> tuple[str, str]:
    """Import lines and definitions."""
    sources = Sources(taken=taken)
    family = find_family(recipe.model.family)
    if family.sizes is not None:
        sources.add_function(family.make, f"model {family.name!r}")
    for name in recipe.pass_names:
        item = find_pass(name)
        if item.contract.source == "user":
            sources.add_function(item.function, f"pass {name!r}")
    lines = sorted({*imported, *sources.imports}, key=lambda line: (not line.startswith("import "), line))
    return "\n" + "\n".join(lines) + "\n", "".join(f"\n\n{text}\n" for text in sources.definitions)


def _plain(text: str) -> str:
    """The text, escaped for a docstring."""
    return text.replace("\\", "\\\\").replace('"""', "'''")
