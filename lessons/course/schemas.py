"""The JSON Schemas of recipes and lessons, which editors use: `make schemas`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.recipe import Recipe
from workbench_lessons.course.lesson import Lesson


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
    user_pass = {"type": "object", "description": "a pass of your own", "required": ["name"],
           "properties": {"name": {"type": "string", "not": {"enum": list(CONTRACTS)}}}}
    schema["$defs"]["PassSpec"] = {"anyOf": [known, *tables, user_pass]}
    clip = schema["$defs"]["TrainingSpec"]["properties"]["clip"]
    clip["anyOf"] = [{"type": "number", "exclusiveMinimum": 0}, {"const": "off"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write_schemas(folder: Path) -> None:
    """Write the JSON Schemas that editors use: `make schemas`."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    lesson = {"$schema": dialect, **Lesson.model_json_schema()}
    for name, schema in (("lesson", lesson), ("recipe", recipe_json_schema())):
        (folder / f"{name}.schema.json").write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")
