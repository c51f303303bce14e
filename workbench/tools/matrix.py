"""A matrix of runs: recipes times repeats, each in its own processes, and one table of all. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.pipeline.progress import Progress, telling
from workbench.recipe.files import json_of, reading
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.recipe.wording import aligned

ENDS = 15.0  # seconds that a run gets after its time limit to report the timeout itself
WIDTH = 100
COLUMNS: dict[str, tuple[Callable[[Mapping[str, Any]], float | None], float, str]] = {
    # heading: (figure of a report, factor, format)
    "step ms": (lambda r: r["median_step_seconds"], 1e3, ",.1f"),
    "tokens/s": (lambda r: r["tokens_per_second"], 1, ",.0f"),
    "peak GiB": (lambda r: r["training"] and r["training"]["peak_bytes"], 2**-30, ".2f"),
    "collectives": (lambda r: r["schedule"]["evidence"].get("collectives"), 1, ",.0f"),
    "launches": (lambda r: r["profile"] and r["profile"]["launches"], 1, ",.0f"),
    "exposed ms": (lambda r: r["profile"] and r["profile"]["exposed_nccl_ms"], 1, ",.1f"),
}


@dataclass(frozen=True)
class Entry:
    """One run of one recipe: its report, or `problem`, why it has none. refused: this machine cannot run it."""

    name: str
    report: dict[str, Any] | None
    problem: str = ""
    refused: bool = False

    @property
    def failed(self) -> bool:
        return not (self.report["ok"] if self.report else self.refused)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """In this block, SIGTERM raises SystemExit, so that runs, which have their own sessions, end with this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@ending_on_sigterm()
def run_matrix(
    recipes: Iterable[str | Path],
    folder: Path,
    *,
    changes: Mapping[str, str] | None = None,
    files: Sequence[Path] = (),
    world: str = "auto",
    level: str = "light",
    repeats: int = 1,
    timeout: float = 300.0,
    tell: Callable[[str], None] = lambda _: None,
    progress: Progress = True,
) -> list[Entry]:
    """Run each recipe `repeats` times, in turn, and keep each report in `folder`.

    A run whose report is already there is not repeated.

    changes: as for Recipe.override, for all recipes. files: Python files that register passes or models, for each run.
    timeout: seconds for one run. A report is reused if recipe, world, level and torch are the same; the contents of
    `files` are not compared. `tell` is called with a line for each run. progress: as for `pipeline.run.run`.

    Raises RecipeError, before anything runs, if a recipe is wrong, and WorkbenchError if two have the same name.
    """
    changed: dict[str, tuple[str, Recipe]] = {}
    for given in recipes:
        recipe = load_recipe(given).override(dict(changes or {}))
        if recipe.name in changed:
            raise WorkbenchError(f"matrix: two recipes are called {recipe.name!r}: give one of them another name")
        changed[recipe.name] = str(given), recipe
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Entry] = []
    refused: dict[str, Entry] = {}
    with telling(progress) as stage:
        for repeat, (name, (given, recipe)) in product(range(1, repeats + 1), changed.items()):
            path = folder / f"{name}.{repeat}.json"
            entry = refused.get(name) or _kept(path, recipe, world, level)
            if entry is None:
                arguments = [given, *(["--set", *(f"{k}={v}" for k, v in changes.items())] if changes else []),
                             *(word for file in files for word in ("--import", str(file))),
                             "--world", world, "--level", level, "--timeout", f"{timeout:g}", "--json", str(path)]
                stage(f"run {name}, {repeat} of {repeats}")
                entry = _run(name, arguments, path, timeout)
                stage.rest()
                if entry.refused:  # a repeat would be, too
                    refused[name] = entry
                tell(f"{name} ({repeat} of {repeats}): {_outcome(entry)}")
            found.append(entry)
    return found


def _kept(path: Path, recipe: Recipe, world: str, level: str) -> Entry | None:
    """The report that is already there, if it is of the same run."""
    if not path.exists():
        return None
    with reading(path, "a run's report", "remove it, or use another folder"):
        report = json_of(path.read_bytes())
        same = (report["recipe"] == json.loads(json.dumps(recipe.to_dict())) and report["level"] == level
                and world in ("auto", report["world"]["kind"])
                and report["versions"]["torch"].split("+")[0] == version("torch").split("+")[0])
        if not same:
            return None
        entry = Entry(recipe.name, report)
        table([entry])  # reads all that will be shown
        return entry


def _run(name: str, arguments: list[str], path: Path, timeout: float) -> Entry:
    path.unlink(missing_ok=True)
    child = subprocess.Popen([sys.executable, "-m", "workbench", "run", *arguments], text=True, start_new_session=True,
                             env={**os.environ, "WORKBENCH_PROGRESS": "0"}, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
    try:
        said = child.communicate(timeout=timeout + ENDS)[1]
    except subprocess.TimeoutExpired:
        end_group(child, signal.SIGKILL)
        return Entry(name, None, f"not done after {timeout:g} s: give it more with --timeout")
    except BaseException:
        end_group(child, signal.SIGINT)
        raise
    if path.exists():
        return Entry(name, json.loads(path.read_text(encoding="utf-8")))
    lines = [line.partition("workbench: error: ")[2] for line in said.splitlines() if "workbench: error: " in line]
    why = "; ".join(lines) or f"ended with {child.returncode}: {said.strip()[-500:]}"
    return Entry(name, None, why, refused=child.returncode == 2)


def signal_group(child: subprocess.Popen[str], how: signal.Signals) -> None:
    """Send a signal to a child's process group, unless the child has ended: its number may be another's."""
    if child.poll() is None:
        os.killpg(child.pid, how)


def end_group(child: subprocess.Popen[str], how: signal.Signals) -> None:
    """End a run. Its ranks and kernels end by themselves when it is gone."""
    signal_group(child, how)
    try:
        child.communicate(timeout=ENDS)
    except subprocess.TimeoutExpired:
        signal_group(child, signal.SIGKILL)
        child.communicate()


def _outcome(entry: Entry) -> str:
    if entry.report is None:
        return entry.problem
    return "PASS" if entry.report["ok"] else f"FAIL, {entry.report['problems'][0]}"


def _figure(reports: Sequence[Mapping[str, Any]], heading: str) -> str:
    """The median over the repeats, and half the range as its noise band."""
    read, factor, form = COLUMNS[heading]
    values = [value * factor for report in reports if (value := read(report)) is not None]
    if not values:
        return ""
    band = f" ±{noise(values):{form}}" if noise(values) else ""
    return f"{statistics.median(values):{form}}{band}"


def noise(values: Sequence[float]) -> float:
    """Half the range: the maximum minus the minimum."""
    return (max(values) - min(values)) / 2


def gravest(reports: Sequence[Mapping[str, Any]]) -> str:
    """FAIL, NO_EFFECT or PASS: the worst of all runs."""
    if not all(report["ok"] for report in reports):
        return "FAIL"
    idle = any(row["outcome"] == "NO_EFFECT" for report in reports for row in report["passes"])
    return "NO_EFFECT" if idle else "PASS"


def table(entries: Sequence[Entry]) -> str:
    """A row for each recipe that ran; below them, why others did not, and the machine of the figures."""
    names = list(dict.fromkeys(entry.name for entry in entries))
    ran = {name: [e.report for e in entries if e.name == name and e.report is not None] for name in names}
    rows = [[name, gravest(reports), *(_figure(reports, heading) for heading in COLUMNS)]
            for name, reports in ran.items() if reports]
    heads = ["recipe", "verdicts", *COLUMNS]
    used = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    lines = aligned([[row[i] for i in used] for row in [heads, *rows]], range(2, len(heads))) if rows else []
    said = [f"{name}: {problem}" for name, reports in ran.items() for report in reports
            for problem in report["problems"]]
    said += [f"{entry.name} did not run: {entry.problem}" for entry in entries if entry.report is None]
    said += dict.fromkeys(_where(report) for reports in ran.values() for report in reports)
    for text in dict.fromkeys(said):
        lines += ["", *textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)]
    return "\n".join(lines).lstrip("\n")


def _where(report: Mapping[str, Any]) -> str:
    machine, world = report["machine"], report["world"]
    on = machine["gpus"][0] if machine["gpus"] else machine["cpu"]
    return (f"{world['size']} {world['kind']} ranks, torch {report['versions']['torch']}, Python "
            f"{report['versions']['python']}, {on}, {machine['cores']} cores" + (
                f"; step: median of {len(report['training']['step_seconds']) - 1} after the first"
                if report["training"] else ""))
