"""How fast this machine multiplies matrices, and what that leaves of a step's time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from workbench.world.mesh import World

WINDOWS = 3
SIZES = {"cpu": 512, "cuda": 8192}


def matmul_ceiling(world: World, dtype: torch.dtype, *, seconds: float = 0.15) -> float:
    """FLOP/s of square matmuls in `dtype` on all ranks at once, added up; every rank calls it and gets the same.

    The best of three windows of `seconds`. All ranks at once, because ranks of one host share cores and power.
    """
    if world.kind not in ("gloo", "nccl"):
        raise ValueError(f"a {world.kind} world has no speed")
    size = SIZES[world.device.type]
    a = torch.randn(size, size, device=world.device).to(dtype)
    b, out = a.clone(), torch.empty_like(a)
    world.synchronise()
    torch.mm(a, b, out=out)
    best = 0.0
    for _ in range(WINDOWS):
        if world.size > 1:
            dist.barrier()
        world.synchronise()
        count, started = 0, time.perf_counter()
        while (spent := time.perf_counter() - started) < seconds or count == 0:
            for _ in range(8 if world.device.type == "cuda" else 1):
                torch.mm(a, b, out=out)
                count += 1
            world.synchronise()
        rate = torch.tensor(2.0 * size**3 * count / spent, dtype=torch.float64, device=world.device)
        if world.size > 1:
            dist.all_reduce(rate)
        best = max(best, float(rate))
    return best


@dataclass(frozen=True)
class Roofline:
    """The least time that a step's matmuls take here.

    flop_per_token: the joint graph's, before any pass, all ranks' together over the tokens of a step; 0 where these are
    not known. ceiling: measured FLOP/s of matmuls on all ranks, in `dtype`; None where nothing was measured, and
    `reason` says why.
    step_seconds: FLOP of a step over the ceiling. fraction: that over the measured step.
    """

    flop_per_token: float
    dtype: str
    ceiling: float | None = None
    step_seconds: float | None = None
    fraction: float | None = None
    reason: str = ""


def roofline(
    flop_per_token: float,
    dtype: str,
    tokens: int,
    ceiling: float | None,
    measured: float | None,
    reason: str = "",
) -> Roofline:
    """Put the figures together; `measured` is the median step in seconds, or None."""
    if ceiling is None:
        return Roofline(flop_per_token, dtype, reason=reason)
    least = flop_per_token * tokens / ceiling
    return Roofline(
        flop_per_token, dtype, ceiling, least, least / measured if measured else None, reason
    )
