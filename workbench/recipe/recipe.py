"""Recipe: model, mesh, data, passes and expectations of one run, declared in one TOML file.

No torch here; a recipe that lists passes of the package imports their files, and so torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, field_validator, model_validator

from workbench.recipe.edits import apply_overrides, flatten
from workbench.recipe.files import course_folder
from workbench.recipe.hooks import check_value, hook_of, values_of
from workbench.recipe.rules import rule_problems
from workbench.recipe.sections import (
    DataSpec,
    Expectations,
    MeshSpec,
    ModelSpec,
    PassSpec,
    PrecisionSpec,
    Section,
    TrainingSpec,
)
from workbench.recipe.strict_toml import (
    DeclarationError,
    Declared,
    Problem,
    check,
    files_in,
    find_file,
    freeze,
    read_toml,
)
from workbench.recipe.wording import mesh_text


class RecipeError(DeclarationError):
    """A recipe with errors: all of them, each with file and key."""


class Recipe(Declared):
    """Everything one run needs; see `load_recipe`. Raises RecipeError where a pass or mesh rule is broken."""

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    about: str = ""
    model: ModelSpec = ModelSpec()
    mesh: MeshSpec = MeshSpec()
    data: DataSpec = DataSpec()
    precision: PrecisionSpec = PrecisionSpec()
    capture: str = Field("joint", description="joint: by Dynamo and AOTAutograd, cut by torch's partitioner; traced: "
                                              "by make_fx, with the recomputation placed in the graph; or a plugin's")
    joint_passes: tuple[PassSpec, ...] = ()
    passes: tuple[PassSpec, ...] = ()
    training: TrainingSpec = TrainingSpec()
    expect: Expectations = Expectations()
    strict: bool = Field(False, description="a pass without effect is an error")
    free_order: bool = Field(False, description="passes of a stage may stand in any order, to see why order matters")
    vars()["__annotations__"] |= {
        name: Annotated[hook_of("section", name) | None, Field(None)] for name in values_of("section")
    }

    @field_validator("capture")
    @classmethod
    def _known_capture(cls, value: str) -> str:
        return check_value("capture", value)

    @model_validator(mode="after")
    def _rules(self) -> Self:
        problems = rule_problems(self.model_dump(), self.model.sizes())
        for section in self.sections:
            problems += section.problems(self)
        if problems:
            raise RecipeError(f"recipe {self.name!r}", problems)
        return self

    def __repr__(self) -> str:
        return f"Recipe {self.name}: {self.subject}; passes: {', '.join(self.pass_names) or 'none'}"

    @property
    def sections(self) -> list[Section]:
        """The tables of plugins that the recipe has."""
        return [value for _, value in self if isinstance(value, Section)]

    @property
    def world_size(self) -> int:
        """The ranks that it runs on: those of its mesh, or a multiple that a section asks for."""
        return self.mesh.world_size * math.prod(s.multiplies_ranks for s in self.sections)

    @property
    def subject(self) -> str:
        """The model and its mesh, such as `llama3 debug on dp_shard 2 x tp 2`."""
        return f"{self.model.family} {self.model.flavor} on {mesh_text(self.mesh.axes)}"

    @property
    def pass_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in (*self.joint_passes, *self.passes))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for TOML: every key with a value; a pass without options is its name."""
        data = self.model_dump(exclude_none=True)
        if self.training.clip is None:
            data["training"]["clip"] = "off"
        for where in ("joint_passes", "passes"):
            data[where] = [p.as_toml() for p in getattr(self, where)]
        return data

    def to_toml(self) -> str:
        """TOML text that reads back to an equal recipe."""
        return tomli_w.dumps(self.to_dict())

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """A new recipe with values replaced by dotted key, such as `{"mesh.tp": 2}`.

        Text is read as a TOML value unless the key takes text, so "1e-3" is a number. None restores the default (for
        `training.clip`: off). `passes.NAME.OPTION` sets an option of a listed pass.
        """
        data, problems = apply_overrides(Recipe, self.to_dict(), changes)
        source = f"recipe {self.name!r} with {', '.join(f'{k}={v}' for k, v in changes.items())}"
        if problems:
            raise RecipeError(source, problems)
        return parse_recipe(data, source)


def parse_recipe(data: Mapping[str, Any], source: str) -> Recipe:
    """A recipe from plain data; RecipeError lists every problem, `source` first on each line."""
    data = freeze(data)
    version = data.get("format_version", 1)
    if isinstance(version, int) and version not in (1, True):
        raise RecipeError(source, [Problem("format_version", f"this workbench reads version 1, and the file is "
                                                             f"version {version}: update the workbench")])
    recipe, problems = check(Recipe, data)
    if recipe is None:  # valid sections are still checked against each other
        sections: dict[str, type[Declared]] = {
            "model": ModelSpec, "mesh": MeshSpec, "data": DataSpec, "training": TrainingSpec,
            "expect": Expectations,
        }
        sound: dict[str, Declared | None] = {k: check(m, data.get(k, {}))[0] for k, m in sections.items()}
        lists = {k: _sound_passes(data.get(k, ())) for k in ("joint_passes", "passes")}
        model = sound["model"]
        partial: dict[str, Any] = {k: v.model_dump() for k, v in sound.items() if v is not None} | lists
        partial |= {"free_order": data.get("free_order") is True, "capture": data.get("capture")}
        problems += rule_problems(partial, model.sizes() if isinstance(model, ModelSpec) else None)
        raise RecipeError(source, list(dict.fromkeys(problems)))
    return recipe


def _sound_passes(listed: Any) -> list[dict[str, Any]]:
    specs = [check(PassSpec, p)[0] for p in listed] if isinstance(listed, tuple) else []
    return [p.model_dump() if p else {"name": "", "options": {}} for p in specs]


def recipes_dir() -> Path:
    """Where recipes are found by name: $WORKBENCH_RECIPES, or those of the package."""
    return Path(os.environ.get("WORKBENCH_RECIPES") or course_folder("recipes"))


def recipe_names() -> list[str]:
    """The names of all recipes, in order; RecipeError where there is no folder of them."""
    missing = "no such folder of recipes: set WORKBENCH_RECIPES to one"
    return [path.stem for path in files_in(recipes_dir(), "*.toml", RecipeError, missing)]


def recipe_file(name: str) -> Path:
    """Where the recipe of this name is declared."""
    return recipes_dir() / f"{name}.toml"


def load_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe by the name of a file in `recipes_dir()`, or by path (anything with a "/" or ".toml")."""
    path = find_file(name_or_path, "recipe", recipe_file, recipe_names, RecipeError)
    return parse_recipe(read_toml(path, RecipeError), str(path))


def diff_recipes(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """The differences: dotted key, value in `a`, value in `b`; None where a side has no value."""
    left, right = flatten(a.to_dict()), flatten(b.to_dict())
    return [(k, left.get(k), right.get(k)) for k in left | right if left.get(k) != right.get(k)]
