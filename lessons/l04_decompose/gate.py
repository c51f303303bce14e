"""silu(x) * y in three ways: the bytes that its kernels move, and their times on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from workbench import author_module, capture, fake_world, load_recipe, ranks, run, run_joint
from workbench.graph.capture import JointGraph
from workbench.notebook.draw.picture import Table, table
from workbench_lessons.course.recorded_figures import Figures
from workbench_lessons.l04_decompose.pictures import Way, kernel_traffic

D, FULL = "inductor_decomposition", "full_inductor_compilation"


class Gate(nn.Module):
    """The sum of silu(x) * y, where x is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.empty(8, 32))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return (F.silu(self.x) * y).sum()


def graphs() -> tuple[JointGraph, JointGraph]:
    """The joint graph of the gate on [8, 32], as captured and decomposed."""
    with fake_world(1) as world:
        small = capture(author_module(Gate(), world, None, batch=lambda: (torch.empty(8, 32),)))
    apart = small.fork()
    run_joint(apart, [D])
    return small, apart


def three_ways(small: JointGraph, apart: JointGraph) -> dict[str, Way]:
    """The kernels of the gate's forward: as captured, decomposed, and fused into one."""
    five = ["neg", "exp", "add", "div", "mul"]
    return {"as captured": (small.graph, [["silu"], ["mul"]]), "decomposed": (apart.graph, [[name] for name in five]),
            "decomposed, then fused": (apart.graph, [five])}


def moved(way: Way) -> int:
    """The bytes that the kernels of a way read and write."""
    return sum(kernel.bytes for kernel in kernel_traffic(*way))


def _milliseconds(call: Callable[..., Any], *inputs: torch.Tensor, times: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(10):
        call(*inputs)
    start.record()
    for _ in range(times):
        call(*inputs)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def measure_gate(ways: Mapping[str, Way], decompositions: dict[Any, Any]) -> list[dict[str, Any]]:
    """Each way on two tensors of [8192, 8192]; `ways` are on [8, 32], whose tensors have 1,024 bytes."""

    def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * y

    x, y = torch.randn(2, 8192, 8192, device="cuda")
    parts = make_fx(gate, decomposition_table=decompositions)(x, y)
    calls: list[Callable[..., Any]] = [gate, parts, torch.compile(gate)]
    rows = []
    for (name, way), call in zip(ways.items(), calls, strict=True):
        ms, tensors = _milliseconds(call, x, y), moved(way) // 1024
        rows.append({"gate": name, "tensors moved": tensors, "ms": round(ms, 3),
                     "TB/s": round(tensors * x.nbytes / ms / 1e9, 1)})
    return rows


def times(figures: Figures) -> Figures:
    """The milliseconds of `measure_gate` alone."""
    rows = tuple({"gate": row["gate"], "ms": row["ms"]} for row in figures.rows)
    return replace(figures, rows=rows)


def measure_step() -> list[dict[str, Any]]:
    """The kernels of a small llama3's step on one GPU: as captured, decomposed, and compiled too."""
    alone = load_recipe("llama3").override({"mesh.dp_shard": 1, "mesh.tp": 1, "model.n_layers": 1})
    steps = {"as captured": alone, "decomposed": alone.override({"joint_passes": [D]}),
             "decomposed and compiled": alone.override({"joint_passes": [D], "passes": [FULL]})}
    with ranks(1, backend="nccl", echo="none", timeout=120) as pool:
        profiles = pool.run(lambda: [run(each, progress=False).profile for each in steps.values()])[0]
    return [{"step": name, "kernels": profile.kernels, "kernels, ms": round(profile.kernels_ms, 3)}
            for name, profile in zip(steps, profiles, strict=True)]


def shares(figures: Figures) -> Table:
    """The kernels of each step, and their number and time beside those of the first."""
    rows = []
    for row in figures.rows:
        count, ms = (row[column] / figures.rows[0][column] for column in ("kernels", "kernels, ms"))
        rows.append((row["step"], row["kernels"], row["kernels, ms"], f"× {count:.2f}", f"× {ms:.2f}"))
    columns = ("step", "kernels", "their time, ms", "kernels, relative", "time, relative")
    return table("kernels of a step on one GPU", columns, rows, figures.note)
