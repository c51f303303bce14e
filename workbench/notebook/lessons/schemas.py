"""Write the JSON Schemas that editors use into a folder. No torch here.

    python -m workbench.notebook.lessons.schemas lessons
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workbench.notebook.lessons.lesson import lesson_json_schema
from workbench.recipe.recipe import recipe_json_schema


def schema_texts() -> dict[str, str]:
    """File name to JSON text."""
    schemas = {"recipe.schema.json": recipe_json_schema(), "lesson.schema.json": lesson_json_schema()}
    return {name: json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()}


if __name__ == "__main__":
    for name, text in schema_texts().items():
        (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
