"""How far the simulated compute of a step is from a GPU's. One rank, so that every value is real.

    python benchmarks/accuracy.py measure FILE.jsonl RECIPE [--set KEY=VALUE ...]     (a GPU; one row)
    python benchmarks/accuracy.py simulate MEASURED.jsonl DEVICE --json FILE          (no GPU; all rows)

Each row is the forward and backward of a recipe on one GPU, captured anew for the simulation, on any machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workbench import load_recipe
from workbench.graph.callables import Body, bodies_of
from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.simulated_run import simulated
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.route import StepState, route, walk
from workbench.pipeline.step_profile import profiled
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.world.mesh import World, opened

REPEATS = 5
_KINDS = {"matmul": ("nvjet", "gemm", "cutlass", "splitk", "cublas"), "attention": ("flash", "fmha", "cudnn", "sdp")}


def kind_of(kernel: str) -> str:
    """matmul, attention, or other, by the kernel's name."""
    name = kernel.lower()
    return next((kind for kind, marks in _KINDS.items() if any(m in name for m in marks)), "other")


@contextmanager
def step_state(recipe: Recipe, device: str, *, lower: bool) -> Iterator[StepState]:
    """The recipe's step on rank 0 of its mesh, on a fake world with kernels for `device`; as graphs if not `lower`."""
    world = World("fake", recipe.mesh.world_size, 0, torch.device(device), new_fake_mode())
    with opened("accuracy", world):
        stages = [stage for stage in route(recipe, world)[:-1] if lower or stage.kind is not Stage.LOWERING]
        split = next(i for i, stage in enumerate(stages) if stage.name == "partition") + 1
        state = walk(stages[:split])
        for graph in state.pair.graphs:
            facts_of(graph).world = "nccl" if lower else "fake"
        yield walk(stages[split:], state)


def values(nodes: list[Node], device: str) -> list[Any]:
    """Random inputs of the shapes in the nodes' metadata; integers are small, as token numbers are."""
    made: list[Any] = []
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            tensor = torch.empty_strided(tuple(map(int, value.shape)), tuple(map(int, value.stride())),
                                         dtype=value.dtype, device=device)
            if value.dtype.is_floating_point:
                tensor.normal_(0, 0.02)
            elif value.dtype == torch.int64:
                tensor.random_(0, 200)
            else:
                tensor.zero_()
            made.append(tensor)
        else:
            made.append(value.real_obj if hasattr(value, "real_obj") else int(value))
    return made


def step_of(state: StepState, device: str) -> Callable[[], Any]:
    """Forward and backward on random values; the backward gets what the forward saved."""
    pair = state.pair
    assert isinstance(pair, ForwardBackward)
    forward, backward = bodies_of(pair.graphs, _functions(state), pair.facts)
    results, order = pair.facts.results, pair.facts.saved_order
    tangents = [n for n in backward.inputs if not backward.keeps_address(n)]
    given, gradients = values(forward.inputs, device), values(tangents, device)
    saved_inputs = len(backward.inputs) - len(tangents)

    def step() -> Any:
        saved = list(forward(list(given)))[results:]
        chosen = saved if order is None else [saved[i] for i in order]
        return backward([*chosen[:saved_inputs], *gradients])

    return step


def _functions(state: StepState) -> tuple[Any, Any] | None:
    bodies = state.bodies
    return None if bodies is None else tuple(b.function if isinstance(b, Body) else b for b in bodies)  # type: ignore[return-value]


def measured_row(recipe: Recipe) -> dict[str, Any]:
    """Milliseconds of kernels by kind, the median of a few profiled steps, and of a step with its launches."""
    with step_state(recipe, "cuda", lower=True) as state, torch.no_grad():
        step = step_of(state, "cuda")
        for _ in range(3):
            step()
        samples = []
        for _ in range(REPEATS):
            events, launches = profiled(step)
            by_kind = dict.fromkeys(("matmul", "attention", "other"), 0.0)
            for event in events:
                by_kind[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3
            samples.append((sum(by_kind.values()), by_kind, len(events), launches))
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - started) / 10 * 1e3
    kernels_ms, by_kind, kernels, launches = sorted(samples, key=lambda s: s[0])[REPEATS // 2]
    return {"kernels_ms": kernels_ms, "by_kind": by_kind, "kernels": kernels, "launches": launches, "step_ms": wall,
            "spread_ms": [min(s[0] for s in samples), max(s[0] for s in samples)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure")
    measure.add_argument("out", type=Path)
    measure.add_argument("recipe")
    measure.add_argument("--set", nargs="*", default=[])
    simulate = commands.add_parser("simulate")
    simulate.add_argument("measured", type=Path)
    simulate.add_argument("device")
    simulate.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "measure":
        changes = dict(item.split("=", 1) for item in options.set)
        row = {"recipe": options.recipe, "changes": changes, "machine": machine(), "versions": versions()}
        row |= measured_row(load_recipe(options.recipe).override(changes))
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return
    rows = [json.loads(line) for line in options.measured.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        recipe = load_recipe(row["recipe"]).override(row["changes"])
        with step_state(recipe, "cpu", lower=False) as state:
            compiled = "full_inductor_compilation" in recipe.pass_names
            found = simulated(state.pair.by_part, options.device, fused=compiled)
        row["simulated"] = {"compute_ms": found.compute_ms}
        row["error"] = found.compute_ms / row["kernels_ms"] - 1
        print(f"{row['recipe']} {row['changes']}: {row['kernels_ms']:.2f} ms, simulated {found.compute_ms:.2f}")
    data = {"command": f"benchmarks/accuracy.py simulate {options.measured.name} {options.device}",
            "machine": rows[0]["machine"], "versions": rows[0]["versions"], "rows": rows,
            "median_absolute_error": statistics.median(abs(row["error"]) for row in rows)}
    options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
