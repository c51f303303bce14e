"""Looking at processes from outside, and a sum over ranks, for the tests of the pool."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

SOON = 20.0
"""Seconds: what happens at once takes less, also on a busy machine; the time limit of a pool in the tests is longer."""


def device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def total(value=1.0):
    """`value` summed over all ranks."""
    tensor = torch.tensor([value], device=device())
    dist.all_reduce(tensor)
    return tensor.item()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids: Iterable[int], seconds: float = 10.0) -> list[int]:
    """Those that still run after `seconds`, or none as soon as all have gone."""
    pids, limit = list(pids), time.monotonic() + seconds
    while time.monotonic() < limit and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]
