"""What a start costs, until the first step is done: built on the ranks, or loaded from an artifact.

    python benchmarks/start.py [RECIPE ...] [--repeats 2] [--set KEY=VALUE ...] [--json FILE]

Each row is one command in processes of its own. stages: author, capture, passes and compilation, or author and load,
and the first step, on rank 0. command: from the start of the command to its end, with imports and two steps. cold:
Inductor's cache is empty. warm: it holds all that an earlier run compiled. artifact: its cache is empty too. Commands
take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workbench.pipeline.machine import machine, versions

RECIPES = ("llama3_block_bucketing", "llama3_full_inductor_block_bucketing", "llama3_whole_step")
CHANGES = ("mesh.dp_shard=2", "mesh.tp=2", "training.steps=2")


def timed(words: list[str], cache: Path) -> float:
    """Seconds of one command of the workbench, which must succeed."""
    cache.mkdir(exist_ok=True)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "workbench", *words], check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL,
                   env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    return time.perf_counter() - started


def measured(words: list[str], cache: Path, report: Path) -> dict[str, float]:
    """Seconds of the command, and of its stages and first step as its report says."""
    whole = timed([*words, "--json", str(report)], cache)
    said = json.loads(report.read_text())
    return {"stages": sum(said["seconds"].values()) + said["training"]["step_seconds"][0], "command": whole}


def rows(recipe: str, changes: list[str], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of one recipe, in the order in which they ran."""
    artifact, warm = folder / "artifact", folder / "warm"
    built = ["run", recipe, "--world", "gloo", "--set", *changes]
    found: list[dict[str, Any]] = [{"way": "compile", "command": timed(
        ["compile", recipe, "--set", *changes, "--out", str(artifact)], folder / "compile")}]
    found[0]["bytes"] = sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())
    timed(built, warm)
    for turn in range(repeats):
        found.append({"way": "cold", **measured(built, folder / f"cold{turn}", folder / "report.json")})
        found.append({"way": "artifact", **measured(["run", "--artifact", str(artifact)], folder / f"loaded{turn}",
                                                    folder / "report.json")})
        found.append({"way": "warm", **measured(built, warm, folder / "report.json")})
    return [{"recipe": recipe, **row} for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", nargs="+", default=list(CHANGES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            found += rows(recipe, args.set, args.repeats, Path(folder))
        print(*found[-1 - 3 * args.repeats:], sep="\n", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({
            "command": "python benchmarks/start.py " + " ".join(sys.argv[1:]), "machine": machine(),
            "versions": versions(), "changes": args.set, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
