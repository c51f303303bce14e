"""What a start costs, until the first step is done: built on the ranks, or loaded from an artifact.

    python benchmarks/start.py [RECIPE ...] [--repeats 2] [--ways artifact ...] [--set KEY=VALUE ...] [--json FILE]
    python benchmarks/start.py --gpus [--json FILE]          # a 1b model on two GPUs, replayed as CUDA graphs

Each row is one command in processes of its own. stages: seconds on rank 0 of author, capture, passes and compilation,
or of author and load, and of the first step. command: from the start of the command to its end, with imports and all
steps. cold: Inductor's cache is empty. warm: it holds all that the cold run of the same turn compiled. artifact: its
cache is empty too. losses: of all steps, exactly. The file is written again after each command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workbench.pipeline.machine import gpus, machine, versions

RECIPES = {name: (name, list[str]()) for name in (
    "llama3_block_bucketing", "llama3_full_inductor_block_bucketing", "llama3_whole_step")}
CHANGES = ("mesh.dp_shard=2", "mesh.tp=2", "training.steps=2")
REPLAYED = 'passes=["transformer_block_bucketing", "full_inductor_compilation", "cudagraph"]'
ON_GPUS = {"llama3_full_inductor_block_bucketing_cudagraph": ("llama3_full_inductor_block_bucketing_cudagraph", []),
           "llama3_whole_step, cudagraph": ("llama3_whole_step", [REPLAYED])}
"""What a row is called: the recipe, and what it changes."""
OF_1B = ("model.flavor=1b", "data.seq_len=2048", "data.batch_per_rank=4", "precision.param=bfloat16",
         "mesh.dp_shard=2", "mesh.tp=1", "training.steps=6")
WAYS = ("artifact", "cold", "warm")
LIMIT = 240.0


def timed(words: list[str], cache: Path, gpu: int | None = None) -> float:
    """Seconds of one command of the workbench; RuntimeError, with the end of what it said, where it fails."""
    cache.mkdir(exist_ok=True)
    names = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu is not None else {})
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "workbench", *words], stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, env=os.environ | names, timeout=LIMIT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: exit status {done.returncode}: {done.stderr[-4000:]}")
    return time.perf_counter() - started


def measured(words: list[str], cache: Path, report: Path) -> dict[str, Any]:
    """What one training command took and gave."""
    whole = timed([*words, "--json", str(report)], cache)
    said = json.loads(report.read_text())
    parts = {**said["seconds"], "first step": said["training"]["step_seconds"][0]}
    return {"stages": sum(parts.values()), "parts": parts, "command": whole,
            "losses": [float(loss).hex() for loss in said["training"]["losses"]]}


def compiled(name: str, recipe: str, changes: list[str], folder: Path, gpu: int | None) -> dict[str, Any]:
    """Write the artifact of one recipe."""
    out = folder / "artifact"
    took = timed(["compile", recipe, "--set", *changes, "--out", str(out)], folder / "compile", gpu)
    return {"recipe": name, "way": "compile", "command": took,
            "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file())}


def rows(recipes: dict[str, tuple[str, list[str]]], changes: list[str], repeats: int, ways: list[str], folder: Path,
         on_gpus: bool) -> Iterator[dict[str, Any]]:
    """All rows, in the order in which they ran. Each recipe is compiled on a GPU of its own, if there are GPUs."""
    places = {name: folder / str(i) for i, name in enumerate(recipes)}
    for place in places.values():
        place.mkdir()
    with ThreadPoolExecutor(max(gpus(), 1) if on_gpus else 1) as pool:
        yield from pool.map(lambda each: tried(
            each[1], "compile", compiled, each[1], recipes[each[1]][0], [*changes, *recipes[each[1]][1]],
            places[each[1]], each[0] % gpus() if on_gpus else None), enumerate(recipes))
    order = [(name, "artifact") for name in recipes] + [(name, way) for name in recipes for way in ("cold", "warm")]
    for turn, (name, way) in itertools.product(range(repeats), [each for each in order if each[1] in ways]):
        recipe, own = recipes[name]
        words = ["run", recipe, "--world", "nccl" if on_gpus else "gloo", "--set", *changes, *own]
        if way == "artifact":
            words = ["run-artifact", str(places[name] / "artifact")]
        cache = places[name] / f"{'loaded' if way == 'artifact' else 'built'}{turn}"
        yield {"recipe": name, "way": way} | tried(name, way, measured, words, cache, folder / "report.json")


def tried(name: str, way: str, function: Any, *args: Any) -> dict[str, Any]:
    """What the function gives; one that fails ends no other."""
    try:
        found: dict[str, Any] = function(*args)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found = {"recipe": name, "way": way, "problem": str(error)}
    return found


def latest(changes: list[str]) -> list[str]:
    """The last of the changes of each key."""
    return [f"{key}={value}" for key, value in dict(change.split("=", 1) for change in changes).items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "warm" in args.ways and "cold" not in args.ways:
        parser.error("--ways warm needs cold, too, which fills Inductor's cache for it")
    known = ON_GPUS if args.gpus else RECIPES
    recipes = {name: known.get(name, (name, [])) for name in args.recipes} or known
    changes = latest([*(OF_1B if args.gpus else CHANGES), *args.set])
    found: dict[str, Any] = {"command": "python benchmarks/start.py " + " ".join(sys.argv[1:]), "machine": machine(),
                             "versions": versions(), "changes": changes, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(recipes, changes, args.repeats, args.ways, Path(folder), args.gpus):
            print(json.dumps(row), flush=True)
            found["rows"].append(row)
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
