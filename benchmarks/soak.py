"""What a long session leaves behind: memory, file descriptors, threads, processes and temporary files.

    python benchmarks/soak.py [--pools 300] [--changes 300] [--cells 1000] [--restarts 50] [--json FILE]

pools: two ranks are started, compute and end; in every tenth, one rank raises, and in every tenth, one is killed.
changes: `what_if` on a fake world, between lists of passes; every tenth is refused. cells: `%%ranks` in one IPython,
every tenth fails. restarts: a notebook's kernel opens a pool and is killed. Each is sampled after a tenth of its runs
and at its end.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import KernelManager
from result import tell

from workbench import WorkbenchError, fake_world, load_recipe, what_if
from workbench.world.ranks import RankError, ranks

LISTS = [], ["transformer_block_bucketing"], ["overlap_collectives"], ["transformer_block_bucketing", "graph_cleanup"]
LISTS_JOINT = [], ["reshard_after_forward"]


def sample() -> dict[str, float]:
    """Of this process: MB of memory, descriptors, threads, processes below it; and entries of the temporary folder."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    below, found = {os.getpid()}, 0
    while found != len(below):
        found = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return {"memory_mb": round(memory, 1), "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")), "processes": len(below) - 1,
            "temporary_files": len(os.listdir(tempfile.gettempdir()))}


def summed(number: int) -> float:
    value = torch.ones(1000)
    dist.all_reduce(value)
    if number % 10 == 3 and dist.get_rank() == 1:
        raise ValueError("planted")
    if number % 10 == 7 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return value.sum().item()


def pools(count: int) -> Iterator[None]:
    for i in range(count):
        try:
            with ranks(2, echo="none") as pool:
                assert pool.run(summed, i) == [2000.0, 2000.0] and i % 10 not in (3, 7)
        except RankError:
            assert i % 10 in (3, 7)
        yield


def changes(count: int) -> Iterator[None]:
    recipe = load_recipe("llama3").override({"model.n_layers": 1})
    with fake_world(recipe.mesh.world_size) as world:
        study = what_if(recipe, world)
        for i in range(count):
            study.change({"training.seed": i % 7}, passes=LISTS[i % len(LISTS)], joint_passes=LISTS_JOINT[i % 2])
            if i % 10 == 3:
                with suppress(WorkbenchError):
                    study.change(passes=["nothing"])
            yield


def cells(count: int) -> Iterator[None]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "workbench")
    for i in range(count):
        wrong = "1 / 0" if i % 10 == 3 else "dist.barrier()"
        with redirect_stdout(io.StringIO()):
            shell.run_cell("%%ranks -n 2\nimport torch, torch.distributed as dist\n"
                           f"x = torch.ones({1000 + i})\n{wrong}")
        yield
    shell.run_line_magic("ranks", "stop")


def restarts(count: int) -> Iterator[None]:
    for _ in range(count):
        manager = KernelManager()
        manager.start_kernel()
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(60)
        client.execute("from workbench import ranks\npool = ranks(2)\npool.run(int)")
        client.get_shell_msg(timeout=120)
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        yield


def soaked(runs: Callable[[int], Iterator[None]], count: int) -> dict[str, Any]:
    """The samples after a tenth of the runs and after all, with how long they took."""
    started, first = time.perf_counter(), {}
    for i, _ in enumerate(runs(count), 1):
        if i == max(1, count // 10):
            first = sample()
    time.sleep(3)  # processes of the last run end
    seconds = round(time.perf_counter() - started)
    return {"runs": count, "seconds": seconds, "after_a_tenth": first, "at_the_end": sample()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {"pools": (pools, 300), "changes": (changes, 300), "cells": (cells, 1000), "restarts": (restarts, 50)}
    for name, (_, count) in every.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = {name: getattr(options, name) for name in every}
    found = {name: soaked(every[name][0], count) for name, count in counts.items() if count}
    said = " ".join(["python benchmarks/soak.py", *(f"--{name} {count}" for name, count in counts.items())])
    tell(said, {"rows": found}, options.json)


if __name__ == "__main__":
    main()
