"""Several recipes, each in processes of its own, and one table of their reports.

    python benchmarks/matrix.py [RECIPE ...] --out out/matrix --repeats 3 -- --set mesh.tp=2 --world gloo

What follows `--` goes to each `workbench run`. A run whose report is in the folder already is not repeated: for other
options take another folder. A cell is the median of the repeats, ± half their range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.recipe.recipe import recipe_names
from workbench.recipe.wording import aligned

Report = dict[str, Any]
COLUMNS: dict[str, tuple[Callable[[Report], float | None], float, str]] = {
    # heading: (figure of a report, factor, format)
    "step ms": (lambda r: r["median_step_seconds"], 1e3, ",.1f"),
    "tokens/s": (lambda r: r["tokens_per_second"], 1, ",.0f"),
    "peak GiB": (lambda r: r["training"] and r["training"]["peak_bytes"], 2**-30, ".2f"),
    "saved MiB": (lambda r: r["saved_bytes"], 2**-20, ",.1f"),
    "collectives": (lambda r: r["schedule"]["evidence"].get("collectives"), 1, ",.0f"),
    "exposed ms": (lambda r: r["profile"] and r["profile"]["exposed_nccl_ms"], 1, ",.1f"),
}


def run(recipe: str, path: Path, options: Sequence[str]) -> Report | str:
    """The report in `path`, made now unless it is there; without one, what the command said."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "workbench", "run", recipe, "--json", str(path), *options]
        done = subprocess.run(command, env={**os.environ, "WORKBENCH_PROGRESS": "0"}, text=True,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if not path.exists():
            return done.stderr.strip()[-500:] or f"ended with {done.returncode}"
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def run_in_turn(recipes: Mapping[str, str], folder: Path, repeats: int,
                options: Sequence[str]) -> dict[str, list[Report | str]]:
    """What each run gave, by the recipe's name. recipes: names or files, as `workbench run` takes them."""
    found: dict[str, list[Report | str]] = {name: [] for name in recipes}
    for repeat in range(1, repeats + 1):
        for name, recipe in recipes.items():
            print(f"{name}, {repeat} of {repeats}", file=sys.stderr, flush=True)
            path = folder / f"{Path(recipe).stem}.{repeat}.json"
            found[name].append(run(recipe, path, options))
    return found


def ran(runs: Sequence[Report | str]) -> list[Report]:
    return [report for report in runs if not isinstance(report, str)]


def figures(reports: Sequence[Report], heading: str) -> list[float]:
    read, factor, _ = COLUMNS[heading]
    return [value * factor for report in reports if (value := read(report)) is not None]


def noise(values: Sequence[float]) -> float:
    """Half the range."""
    return (max(values) - min(values)) / 2


def cell(reports: Sequence[Report], heading: str) -> str:
    values, form = figures(reports, heading), COLUMNS[heading][2]
    if not values:
        return ""
    band = f" ±{noise(values):{form}}" if noise(values) else ""
    return f"{statistics.median(values):{form}}{band}"


def gravest(reports: Sequence[Report]) -> str:
    """The worst verdict of all runs."""
    if not all(report["ok"] for report in reports):
        return "FAIL"
    idle = any(row["outcome"] == "NO_EFFECT" for report in reports for row in report["passes"])
    return "NO_EFFECT" if idle else "PASS"


def table(found: Mapping[str, Sequence[Report | str]], more: Mapping[str, str] | None = None) -> str:
    """A row for each recipe that ran, then what failed, and the machines. more: a last column, by name."""
    heads = ["recipe", "verdicts", *COLUMNS]
    rows = [heads]
    below: list[str] = []
    for name, runs in found.items():
        reports = ran(runs)
        below += [f"{name}: {said}" for said in runs if isinstance(said, str)]
        below += [f"{name}: {problem}" for report in reports for problem in report["problems"]]
        if reports:
            rows.append([name, gravest(reports), *(cell(reports, heading) for heading in COLUMNS)])
    for runs in found.values():
        below += [_where(report) for report in ran(runs)]
    if more is not None:
        rows = [[*row, more.get(row[0], "against the first")] for row in rows]
    lines = aligned(rows, range(2, len(heads)))
    return "\n".join([*lines, *dict.fromkeys(below)])


def _where(report: Report) -> str:
    machine, world = report["machine"], report["world"]
    on = machine["gpus"][0] if machine["gpus"] else machine["cpu"]
    return f"{world['size']} {world['kind']} ranks, torch {report['versions']['torch']}, {on}"


def arguments(text: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="folder of the reports")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each, in turn")
    return parser


def split(line: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before `--`, and those after it."""
    at = line.index("--") if "--" in line else len(line)
    return list(line[:at]), list(line[at + 1:])


def main() -> int:
    ours, options = split(sys.argv[1:])
    parser = arguments(__doc__ or "", "out/matrix")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="names or files; none: all recipes")
    asked = parser.parse_args(ours)
    recipes = {Path(name).stem: name for name in asked.recipes or recipe_names()}
    found = run_in_turn(recipes, asked.out, asked.repeats, options)
    print(table(found))
    passed = all(not isinstance(report, str) and report["ok"] for runs in found.values() for report in runs)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
