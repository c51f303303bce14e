"""What plans of `memory_budget` are estimated to cost, beside the steps that were measured with such plans.

    python benchmarks/budgets.py [--json benchmarks/results/budgets.json]

Measured are the lines of benchmarks/results/memory_budget_h200x2.jsonl. Estimated is on a fake world, without a GPU, by
the machine profile that the recipe names: `front` has the bytes saved and the milliseconds computed again of plans of
other budgets, and `rows` those of each measured budget. All milliseconds are beyond those of the step without a budget.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.result import tell
from benchmarks.variants import recipe_of
from workbench.lab.memory_budget.plan_table import memory_plan
from workbench.recipe.files import json_lines

MEASURED = Path(__file__).parent / "results" / "memory_budget_h200x2.jsonl"
FRONT = "llama3_budget_7.0"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    lines = {line["variant"]: line for line in json_lines(MEASURED)}
    found: dict[str, list[object]] = {"front": [], "rows": []}
    for variant, line in lines.items():
        recipe = recipe_of(variant, line["family"], line["changes"])
        if "memory_budget" not in recipe.pass_names:
            continue
        planned = memory_plan(recipe, front=variant == FRONT)
        now = planned.now.ms
        found["front"] += [{"bytes": plan.saved_bytes, "ms": plan.ms - now} for plan in planned.front]
        found["rows"].append({"variant": variant, "bytes": planned.plan.saved_bytes, "ms": planned.plan.ms - now})
        tell("python benchmarks/budgets.py", found, given.json)


if __name__ == "__main__":
    main()
