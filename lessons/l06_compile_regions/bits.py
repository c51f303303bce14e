"""Whether a compiled region gives the bits of the graph without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workbench import PassSpec, compile_step, partition, run_partitioned
from workbench_lessons.l06_compile_regions.parts import Body, Small, X, joint_of

PLAIN = {"cpp.simdlen": 1, "cpp.threads": 1}
"""Plain loops on one thread: the same kernels on every processor."""


class Kept(Small):
    """The function's output times ones, so that the gradient of `ones` is the output."""

    def __init__(self, body: Body):
        super().__init__(body)
        self.ones = nn.Parameter(torch.ones(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x, self.w) * self.ones).sum()


def _results(body: Body, *passes: PassSpec) -> dict[str, torch.Tensor]:
    pair = partition(joint_of(body, Kept))
    run_partitioned(pair, passes)
    step = compile_step(pair)
    step(X).backward()
    return {"output": step.module.ones.grad, "gradient": step.module.w.grad}


def _other_bits(body: Body, names: Sequence[str]) -> dict[str, int]:
    without = _results(body)
    compiled = _results(body, PassSpec(name="regional_inductor", options={"fallback": names, "config": PLAIN}))
    return {f"{what} has other bits": int(not torch.equal(compiled[what], without[what])) for what in compiled}


def bit_faults(body: Body, names: Any) -> dict[str, int]:
    """What is wrong with leaving these operators out of the compiled regions."""
    names = [names] if isinstance(names, str) else list(names)
    wrong = _other_bits(body, names)
    spare = 0
    if not any(wrong.values()):
        fewer = ([other for other in names if other != name] for name in names)
        spare = sum(not any(_other_bits(body, left).values()) for left in fewer)
    return {**wrong, "names too many": spare}
