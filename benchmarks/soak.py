"""What a long session leaves behind: memory, file descriptors, threads, processes and temporary files.

    python benchmarks/soak.py [--pools 300] [--changes 300] [--cells 1000] [--restarts 50] [--json FILE]

pools: two ranks are started, compute and end; in every tenth, one rank raises, and in every tenth, one is killed.
changes: `what_if` on a fake world, between lists of passes; every tenth is refused. cells: `%%ranks` in one IPython,
every tenth fails. restarts: a notebook's kernel with an open pool is restarted; before it, in turn, nothing happens, a
rank raises, a rank is killed, a cell hangs, or the kernel is killed. Each is sampled after every tenth of its runs, and
once more when all is closed. The exit status is 1 where a figure has grown.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result import tell
from workbench import WorkbenchError, fake_world, load_recipe, what_if
from workbench.world.ranks import RankError, ranks

LISTS = [], ["transformer_block_bucketing"], ["overlap_collectives"], ["transformer_block_bucketing", "graph_cleanup"]
LISTS_JOINT = [], ["reshard_after_forward"]


MARK = f"WORKBENCH_SOAK={os.getpid()}"
MEMORY = 0.02
"""How much memory may grow between the first and the second half of the samples: a share of it."""


def sample() -> dict[str, float]:
    """MB of this process and of those that it started, its descriptors and threads, their number, temporary files."""
    own, started = Path("/proc/self"), _started()
    return {"memory_mb": _memory(own), "started_mb": round(sum(map(_memory, started)), 1),
            "descriptors": len(os.listdir(own / "fd")), "threads": len(os.listdir(own / "task")),
            "processes": len(started), "temporary_files": len(os.listdir(tempfile.gettempdir()))}


def _memory(process: Path) -> float:
    try:
        return round(int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
    except OSError:  # it has ended
        return 0.0


def _started() -> list[Path]:
    """The processes below this one, and those of them that have lost their parent: they keep the environment's mark."""
    parents, marked = {}, set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if MARK.encode() in (process / "environ").read_bytes().split(b"\0"):
                marked.add(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    below, found = {os.getpid()} | marked, 0
    while found != len(below):
        found = len(below)
        below |= {pid for pid, parent in parents.items() if parent in below}
    return [Path("/proc") / str(pid) for pid in below - {os.getpid()}]


def grown(samples: Sequence[dict[str, float]]) -> list[str]:
    """One sentence for each figure whose middle is larger in the second half of the samples than in the first.

    The first sample is left out: caches fill.
    """
    later = samples[1:]
    first, second = later[:len(later) // 2], later[len(later) // 2:]
    found = []
    for name in later[0]:
        was, now = (statistics.median(each[name] for each in half) for half in (first, second))
        if now > was * (1 + (MEMORY if name.endswith("_mb") else 0)):
            found.append(f"{name} grew from {was:g} to {now:g}")
    return found


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


OPEN = "import os, time\nfrom workbench import ranks\npool = ranks(2, echo='none')\nassert pool.run(int) == [0, 0]"
FAULTS = {"pass": True, "pool.run(lambda: 1 / 0)": True, "pool.run(lambda: os.kill(os.getpid(), 9))": True,
          "pool.run(lambda: time.sleep(600))": False, "os.kill(os.getpid(), 9)": False}
"""What a cell does before the restart, and whether it ends."""


def restarts(count: int) -> Iterator[None]:
    manager = KernelManager()
    manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for i in range(count):
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(60)
        assert status_of(client, OPEN) == "ok"
        fault, ends = list(FAULTS.items())[i % len(FAULTS)]
        if ends:
            assert status_of(client, fault) == ("ok" if fault == "pass" else "error")
        else:
            client.execute(fault)
            time.sleep(1)
        client.stop_channels()
        manager.restart_kernel(now=True)
        yield
    manager.shutdown_kernel(now=True)


def status_of(client: BlockingKernelClient, source: str) -> str:
    """Run a cell: "ok" or "error"."""
    return client.execute_interactive(source, timeout=120, output_hook=lambda message: None)["content"]["status"]


def soaked(runs: Callable[[int], Iterator[None]], count: int) -> dict[str, Any]:
    """The samples after each tenth of the runs, and when all is closed, with how long the runs took."""
    os.environ.setdefault(*MARK.split("="))
    started, samples, at = time.perf_counter(), [], {max(1, count * i // 10) for i in range(1, 11)}
    for i, _ in enumerate(runs(count), 1):
        if i in at:
            samples.append(sample())
    seconds = round(time.perf_counter() - started)
    time.sleep(3)  # processes of the last run end
    return {"runs": count, "seconds": seconds, "samples": samples, "closed": sample(), "grown": grown(samples)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {"pools": (pools, 300), "changes": (changes, 300), "cells": (cells, 1000), "restarts": (restarts, 50)}
    for name, (_, count) in every.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = {name: getattr(options, name) for name in every}
    with tempfile.TemporaryDirectory(prefix="workbench-soak-") as folder:  # where nothing else writes
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        found = {name: soaked(every[name][0], count) for name, count in counts.items() if count}
    said = " ".join(["python benchmarks/soak.py", *(f"--{name} {count}" for name, count in counts.items())])
    tell(said, {"rows": found}, options.json)
    sys.exit(any(row["grown"] for row in found.values()))


if __name__ == "__main__":
    main()
