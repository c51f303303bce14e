"""What ranks cost: a cold start, and a warm call, beside torch's own launchers.

    python benchmarks/ranks.py [--ranks 2 4 8] [--repeats 5] [--json FILE]

whole: ranks are started, each takes part in one all-reduce, and all have ended. first: until the first result is here.
warm: an all-reduce of one number on ranks that run already; the launchers have none, and start anew. Medians, taken in
turn, in a process that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workbench.pipeline.machine import machine, versions
from workbench.world.ranks import ranks

WARM_CALLS = 30


def total() -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def spawned(rank: int, n: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, n), rank=rank, world_size=n)
    assert total() == n
    dist.destroy_process_group()


def launched() -> float:
    dist.init_process_group("gloo")
    value = total()
    dist.destroy_process_group()
    return value


def pool_times(n: int, folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    with ranks(n, backend="gloo", echo="none") as pool:
        assert pool.run(total) == [float(n)] * n
        first = time.perf_counter() - started
        times = []
        for _ in range(WARM_CALLS):
            began = time.perf_counter()
            pool.run(total)
            times.append(time.perf_counter() - began)
        ending = time.perf_counter()
    whole = first + time.perf_counter() - ending
    return {"whole": whole, "first": first, "warm": statistics.median(times[1:])}


def spawn_times(n: int, folder: Path) -> dict[str, float]:
    started = time.perf_counter()
    mp.spawn(spawned, (n, str(folder / f"store{time.monotonic_ns()}")), n)
    return {"whole": time.perf_counter() - started}


def elastic_times(n: int, folder: Path) -> dict[str, float]:
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=n, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", run_id=f"run{time.monotonic_ns()}", max_restarts=0)
    started = time.perf_counter()
    assert list(elastic_launch(config, launched)().values()) == [float(n)] * n
    return {"whole": time.perf_counter() - started}


WAYS: dict[str, Callable[[int, Path], dict[str, float]]] = {
    "workbench.ranks": pool_times, "torch.multiprocessing.spawn": spawn_times, "elastic_launch": elastic_times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for n in args.ranks:
            times: dict[tuple[str, str], list[float]] = {}
            for _ in range(args.repeats):
                for way, measure in WAYS.items():
                    for name, seconds in measure(n, Path(folder)).items():
                        times.setdefault((way, name), []).append(seconds)
            for (way, name), each in times.items():
                rows.append({"ranks": n, "way": way, "what": name, "seconds": statistics.median(each),
                             "lowest": min(each), "highest": max(each)})
                print(f"{n} ranks  {way:<28}{name:<7}{statistics.median(each) * 1e3:10.1f} ms"
                      f"   ({min(each) * 1e3:.1f} to {max(each) * 1e3:.1f})", flush=True)
    if args.json:
        found = {"command": "python benchmarks/ranks.py", "repeats": args.repeats, "machine": machine(),
                 "versions": versions(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
