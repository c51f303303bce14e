"""Odd recipes and overrides: each is read, and can be written again, or is refused with its file and key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import strategies as st
from odd import damaged, edited, edits, holds, is_a_sentence, json_values, python_values, toml_values, words

from workbench.errors import WorkbenchError
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.edits import all_keys
from workbench.recipe.recipe import Recipe, diff_recipes, load_recipe, parse_recipe, recipe_names, recipes_dir

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

FILES = {name: (recipes_dir() / f"{name}.toml").read_bytes() for name in recipe_names()}
TABLES = {name: tomllib.loads(text.decode()) for name, text in FILES.items()}
names = st.sampled_from(sorted(FILES))
OPTIONS = [f"{where}.{name}.{option}" for where in ("passes", "joint_passes")
           for name, contract in CONTRACTS.items() for option in contract.options.model_fields]
keys = st.one_of(st.sampled_from(all_keys(Recipe)), st.sampled_from(OPTIONS), words,
                 st.sampled_from(["", ".", "model", "model.", ".dim", "model.dim.x", "passes", "passes.", "mesh.tp.0"]))


def read_or_refused(path: Path) -> Recipe | None:
    try:
        recipe = load_recipe(path)
    except WorkbenchError as error:
        assert str(error).startswith(str(path))
        is_a_sentence(str(error))
        return None
    again = parse_recipe(tomllib.loads(recipe.to_toml()), "again")
    assert again == recipe and diff_recipes(again, recipe) == []
    return recipe


def test_a_recipe_with_odd_values_is_read_or_refused(tmp_path: Path) -> None:
    def check(name: str, changes: list[Any]) -> None:
        path = tmp_path / "odd.toml"
        path.write_text(tomli_w.dumps(edited(TABLES[name], changes)), encoding="utf-8")
        read_or_refused(path)

    holds(5000, check, names, edits(toml_values))


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    def check(text: bytes) -> None:
        path = tmp_path / "odd.toml"
        path.write_bytes(text)
        read_or_refused(path)

    large = [b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000, b"a." * 5000 + b"b = 1",
             b'name = "' + b"x" * 10**6 + b'"']
    holds(5000, check, st.one_of(names.flatmap(lambda name: damaged(FILES[name])), st.binary(max_size=60),
                                     st.sampled_from(large)))


def test_an_override_is_taken_or_refused_with_its_key() -> None:
    def check(name: str, changes: dict[str, Any]) -> None:
        try:
            recipe = load_recipe(name).override(changes)
        except WorkbenchError as error:
            is_a_sentence(str(error), name)
            return
        assert parse_recipe(tomllib.loads(recipe.to_toml()), "again") == recipe

    holds(5000, check, names, st.dictionaries(keys, st.one_of(words, json_values, python_values), min_size=1,
                                                  max_size=3))
