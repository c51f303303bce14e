"""Recipe: model, mesh, data, passes and expectations of one run, declared in one TOML file.

No torch here: a recipe is read, checked, changed and compared before torch is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from .contracts import CONTRACTS
from .declare import DeclarationError, Declared, Problem, check, freeze, read_toml, suggestion
from .recipe_edit import apply_overrides, flatten
from .recipe_rules import rule_problems
from .sizes import SIZES as SIZES

Dtype = Literal["float32", "bfloat16", "float64"]


class RecipeError(DeclarationError):
    """A recipe that cannot be read: all its problems, each with file and key."""


_NO_SIZES = {"family", "flavor", "attention", "mask", "document_token"}


class ModelSpec(Declared):
    """A model family and flavor; a size given here replaces the flavor's."""

    family: Literal["llama3"] = "llama3"
    flavor: str = Field("debug", description="debug, 1b or 8b")
    attention: Literal["sdpa", "flex"] = "sdpa"
    mask: Literal["causal", "document"] = Field("causal", description="document needs attention flex")
    document_token: int = Field(0, ge=0, description="the token that ends a document")
    dim: PositiveInt | None = None
    n_layers: PositiveInt | None = None
    n_heads: PositiveInt | None = None
    n_kv_heads: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    ffn_dim: PositiveInt | None = None
    rope_theta: float | None = Field(None, gt=0)
    norm_eps: float | None = Field(None, gt=0)
    max_seq_len: PositiveInt | None = None

    @field_validator("flavor")
    @classmethod
    def _known_flavor(cls, value: str) -> str:
        known = {f for flavors in SIZES.values() for f in flavors}
        if value not in known:
            raise ValueError(f"unknown flavor {value!r}: one of {', '.join(SIZES['llama3'])}")
        return value

    @model_validator(mode="after")
    def _documents_need_flex(self) -> Self:
        if self.mask == "document" and self.attention != "flex":
            raise ValueError("mask document needs attention flex: set attention, or leave mask out")
        return self

    def sizes(self) -> dict[str, float]:
        """Every size of the model: the flavor's, with those given here in their place."""
        flavor = SIZES[self.family][self.flavor]
        given = self.model_dump(exclude=_NO_SIZES, exclude_none=True)
        return {**flavor, **given}


class MeshSpec(Declared):
    """Ranks along each mesh axis. `ep` lies within `dp_shard` and adds no ranks."""

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each reads its own batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> dict[str, int]:
        """Axes of more than one rank, outermost first, as the device mesh names them."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def fsdp(self) -> bool:
        return self.dp_shard > 1 or self.dp_replicate > 1


class DataSpec(Declared):
    """Byte-level text: a folder, or by default the sources of Python's standard library."""

    path: str | None = Field(None, min_length=1, description="a folder of text; relative to where the command runs")
    seq_len: PositiveInt = 64
    batch_per_rank: PositiveInt = Field(2, description="sequences for each data-parallel rank and step")
    seed: NonNegativeInt = 0


class PrecisionSpec(Declared):
    """Dtypes of the forward's parameters and of gradient reductions."""

    param: Dtype = "float32"
    reduce: Dtype = "float32"


class PassSpec(Declared):
    """One pass of the list: its name alone, or a table with its name and options."""

    name: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and not isinstance(value.get("options"), Mapping):
            return {"options": {k: v for k, v in value.items() if k != "name"},
                    **{k: v for k, v in value.items() if k == "name"}}
        return value

    def as_toml(self) -> str | dict[str, Any]:
        return {"name": self.name, **self.options} if self.options else self.name


class TrainingSpec(Declared):
    """Steps and optimizer. `clip` is the largest gradient norm; "off" leaves gradients as they are."""

    steps: PositiveInt = 10
    optimizer: Literal["adamw"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    clip: float | None = Field(1.0, gt=0)
    seed: NonNegativeInt = 0
    deterministic: bool = True

    @field_validator("clip", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return None if value == "off" else value


class Expectations(Declared):
    """What must hold after the run, beside the passes' own contracts."""

    loss_falls: bool = False
    no_effect: tuple[str, ...] = Field((), description="passes that may change nothing here")
    max_saved_bytes: PositiveInt | None = Field(None, description="saved between forward and backward, a rank")


class Recipe(Declared):
    """Everything one run needs; see `load_recipe`. Raises RecipeError where a pass or mesh rule is broken."""

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    about: str = ""
    model: ModelSpec = ModelSpec()
    mesh: MeshSpec = MeshSpec()
    data: DataSpec = DataSpec()
    precision: PrecisionSpec = PrecisionSpec()
    joint_passes: tuple[PassSpec, ...] = ()
    passes: tuple[PassSpec, ...] = ()
    training: TrainingSpec = TrainingSpec()
    expect: Expectations = Expectations()
    strict: bool = Field(False, description="a pass without effect is an error")

    @model_validator(mode="after")
    def _rules(self) -> Self:
        problems = rule_problems(self.model_dump(), self.model.sizes())
        if problems:
            raise RecipeError(f"recipe {self.name!r}", problems)
        return self

    def __repr__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.axes.items()) or "one rank"
        passes = ", ".join(self.pass_names) or "none"
        return f"Recipe {self.name}: {self.model.family} {self.model.flavor} on {axes}; passes: {passes}"

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

        Text is read as a TOML value where the key does not take text, so "1e-3" is a number; None puts
        the default back (for `training.clip`: off). `passes.NAME.OPTION` sets an option of a listed pass.
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
    sections: dict[str, type[Declared]] = {
        "model": ModelSpec, "mesh": MeshSpec, "data": DataSpec, "expect": Expectations,
    }
    try:
        recipe, problems = check(Recipe, data)
    except RecipeError as exc:
        recipe, problems = None, list(exc.problems)
    else:
        if problems:  # the sections that stand on their own are still checked against each other
            sound: dict[str, Declared | None] = {k: check(m, data.get(k, {}))[0] for k, m in sections.items()}
            lists = {k: _sound_passes(data.get(k, ())) for k in ("joint_passes", "passes")}
            model = sound["model"]
            partial: dict[str, Any] = {k: v.model_dump() for k, v in sound.items() if v is not None} | lists
            problems += rule_problems(partial, model.sizes() if isinstance(model, ModelSpec) else None)
    if recipe is None:
        raise RecipeError(source, list(dict.fromkeys(problems)))
    return recipe


def _sound_passes(listed: Any) -> list[dict[str, Any]]:
    found = [check(PassSpec, p)[0] for p in listed] if isinstance(listed, tuple) else []
    return [p.model_dump() if p else {"name": "", "options": {}} for p in found]


def recipes_dir() -> Path:
    """Where recipes are found by name: $WORKBENCH_RECIPES, or lessons/recipes of the checkout."""
    return Path(os.environ.get("WORKBENCH_RECIPES") or Path(__file__).resolve().parent.parent / "lessons" / "recipes")


def recipe_names() -> list[str]:
    return sorted(p.stem for p in recipes_dir().glob("*.toml"))


def load_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe by the name of a file in `recipes_dir()`, or by path (anything with a "/" or ".toml")."""
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text or isinstance(name_or_path, Path):
        path = Path(text).expanduser()
        return parse_recipe(read_toml(path, RecipeError), text)
    path = recipes_dir() / f"{text}.toml"
    if not recipes_dir().is_dir():
        raise RecipeError(str(recipes_dir()), [Problem("", "no such folder of recipes: install from a checkout with "
                                                           "`pip install -e .`, or set WORKBENCH_RECIPES")])
    if not path.is_file():
        near = "no recipe of this name" + suggestion(text, recipe_names())
        raise RecipeError(f"recipe {text!r}", [Problem("", near)])
    return parse_recipe(read_toml(path, RecipeError), str(path))


def diff_recipes(a: Recipe, b: Recipe) -> list[tuple[str, Any, Any]]:
    """What differs: dotted key, value in `a`, value in `b`; None where a side has no value."""
    left, right = flatten(a.to_dict()), flatten(b.to_dict())
    return [(k, left.get(k), right.get(k)) for k in [*left, *(k for k in right if k not in left)]
            if left.get(k) != right.get(k)]


def recipe_json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe's TOML, for editors: pass options come from the contracts."""
    schema = Recipe.model_json_schema()
    tables = []
    for contract in CONTRACTS.values():
        options = contract.options.model_json_schema()
        tables.append({
            "type": "object", "description": contract.changes, "required": ["name"], "additionalProperties": False,
            "properties": {"name": {"const": contract.name}, **options.get("properties", {})},
        })
    known = {"type": "string", "description": "a pass without options", "examples": list(CONTRACTS)}
    own = {"type": "object", "description": "a pass of your own", "required": ["name"],
           "properties": {"name": {"type": "string", "not": {"enum": list(CONTRACTS)}}}}
    schema["$defs"]["PassSpec"] = {"anyOf": [known, *tables, own]}
    clip = schema["$defs"]["TrainingSpec"]["properties"]["clip"]
    clip["anyOf"] = [{"type": "number", "exclusiveMinimum": 0}, {"const": "off"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
