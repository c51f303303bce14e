"""How far a simulated step is from a GPU's: its compute, and the exposed communication of steps on several.

    python benchmarks/accuracy.py measure FILE.jsonl RECIPE [--set KEY=VALUE ...]     (a GPU; one row)
    python benchmarks/accuracy.py simulate MEASURED.jsonl ... DEVICE --json FILE      (no GPU; all rows)

Each row is the forward and backward of a recipe on one GPU, captured again for the simulation, on any machine.
"""

from __future__ import annotations

import argparse
import itertools
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
from workbench.authoring.author import author
from workbench.graph.callables import Body, bodies_of
from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward, partition
from workbench.graph.read.simulated_run import StepTimeline
from workbench.notebook.draw.timeline import simulated_as_run
from workbench.passes.overlap_collectives import OverlapOptions
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.run_passes import run_joint, run_partitioned
from workbench.pipeline.stages import capture_joint, passes_before
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
def recipe_pair(recipe: Recipe, device: str, *, lower: bool) -> Iterator[ForwardBackward]:
    """The recipe's step on rank 0 of its mesh, on a fake world with kernels for `device`; as graphs if not `lower`."""
    world = World("fake", recipe.mesh.world_size, 0, torch.device(device), new_fake_mode())
    with opened("accuracy", world):
        joint = capture_joint(recipe, author(recipe, world))
        run_joint(joint, recipe.joint_passes)
        pair = partition(joint)
        for graph in pair.graphs:
            facts_of(graph).world = "nccl" if lower else "fake"
        specs = recipe.passes if lower else passes_before(recipe.passes, (Stage.LOWERING,))
        run_partitioned(pair, specs)
        yield pair


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


def step_of(pair: ForwardBackward, device: str) -> Callable[[], Any]:
    """Forward and backward on random values; the backward gets what the forward saved."""
    forward, backward = bodies_of(pair.graphs, _functions(pair), pair.facts)
    results, order = pair.facts.results, pair.facts.saved_order
    tangents = [n for n in backward.inputs if not backward.keeps_address(n)]
    given, gradients = values(forward.inputs, device), values(tangents, device)
    saved_inputs = len(backward.inputs) - len(tangents)

    def step() -> Any:
        saved = list(forward(list(given)))[results:]
        chosen = saved if order is None else [saved[i] for i in order]
        return backward([*chosen[:saved_inputs], *gradients])

    return step


def _functions(pair: ForwardBackward) -> tuple[Any, Any] | None:
    bodies = pair.known.bodies
    return None if bodies is None else tuple(b.function if isinstance(b, Body) else b for b in bodies)  # type: ignore[return-value]


def measured_row(recipe: Recipe) -> dict[str, Any]:
    """Milliseconds of kernels by kind, the median of a few profiled steps, and of a step with its launches."""
    with recipe_pair(recipe, "cuda", lower=True) as pair, torch.no_grad():
        step = step_of(pair, "cuda")
        for _ in range(3):
            step()
        samples = []
        for _ in range(REPEATS):
            kernels, launches = profiled(step)
            by_kind = dict.fromkeys(("matmul", "attention", "other"), 0.0)
            for kernel in kernels:
                by_kind[kind_of(kernel.name)] += (kernel.end - kernel.begin) / 1e3
            samples.append((sum(by_kind.values()), by_kind, len(kernels), launches))
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
    simulate.add_argument("measured", type=Path, nargs="+")
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
    rows = [json.loads(line) for path in options.measured for line in path.read_text(encoding="utf-8").splitlines()]
    exposed = "exposed_nccl_ms" in rows[0]
    found, left = exposed_rows(rows, options.device) if exposed else (compute_rows(rows, options.device), [])
    names = " ".join(path.name for path in options.measured)
    data = {"command": f"benchmarks/accuracy.py simulate {names} {options.device}",
            "machine": rows[0]["machine"], "versions": rows[0]["versions"], "device": options.device, "rows": found,
            "median_absolute_error": statistics.median(abs(row["error"]) for row in found)}
    if exposed:
        data |= {"left_out": left, "ranking": ranking(found, "step_ms", "simulated_step_ms")}
        if steps := [abs(row["simulated_step_ms"] / row["step_ms"] - 1) for row in found if not row["optimizer"]]:
            data["median_absolute_step_error"] = statistics.median(steps)
    else:
        data["ranking"] = ranking(found)
    options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def simulated_step(recipe: Recipe, device: str, *, launches: bool = False) -> StepTimeline:
    compiled = "full_inductor_compilation" in recipe.pass_names
    with recipe_pair(recipe, "cpu", lower=False) as pair:
        return simulated_as_run(pair.by_part, device, compiled=compiled,
                                replayed=False if launches else None)


def compute_rows(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """Each row of `measure`, with the simulated compute and its error, and the step whose launches are charged."""
    found = []
    for row in rows:
        run = simulated_step(load_recipe(row["recipe"]).override(row["changes"]), device, launches=True)
        ms = run.compute_ms
        kept = {key: row[key] for key in ("recipe", "changes", "kernels_ms", "by_kind", "kernels", "step_ms")}
        found.append({**kept, "simulated_ms": ms, "error": ms / row["kernels_ms"] - 1,
                      "simulated_step_ms": run.total_ms})
        print(f"{row['recipe']} {row['changes']}: {row['kernels_ms']:.2f} ms, simulated {ms:.2f}")
    return found


def ranking(rows: list[dict[str, Any]], measured: str = "kernels_ms", simulated: str = "simulated_ms",
            apart: float = 0.05) -> dict[str, Any]:
    """How many pairs of lists of equal sizes were measured more than `apart` of the shorter step from each other.

    And the pairs that the simulation puts in another order, with their sizes. measured, simulated: keys of the rows.
    """
    def sizes(row: dict[str, Any]) -> dict[str, str]:
        return {key: value for key, value in row["changes"].items() if key not in ("passes", "joint_passes")}

    pairs = [(a, b) for a, b in itertools.combinations(sorted(rows, key=lambda row: row[measured]), 2)
             if sizes(a) == sizes(b) and b[measured] > (1 + apart) * a[measured]]
    return {"pairs": len(pairs), "wrong": [{"faster": a["recipe"], "slower": b["recipe"], "changes": sizes(a)}
                                           for a, b in pairs if a[simulated] > b[simulated]]}


def why_not(recipe: Recipe) -> str:
    """Why a measured list of ours is no row of the table; "" where it is one."""
    if "cudagraph" not in recipe.pass_names:
        return "nothing replays it: its ranks waited for each other's launches, which nothing simulates"
    if recipe.training.step == "whole":
        return "the optimizer is in its graph, and no simulated optimizer was held against a measured one"
    if "async_tensor_parallel" in recipe.pass_names:
        return "the profile has no operator that multiplies while it sends"
    return ""


def ordered_for(recipe: Recipe) -> str:
    """The device by whose costs `overlap_collectives` orders; "" where it is not listed."""
    devices = [spec.options.get("device", OverlapOptions().device) for spec in recipe.passes
               if spec.name == "overlap_collectives"]
    return devices[0] if devices else ""


def exposed_rows(rows: list[dict[str, Any]], device: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lists of `benchmarks/step_time.py` that are ours, one row a list; and those that are left out, with why.

    error: of the exposure, against the run in which the ranks waited least for each other.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "passes" in row:
            runs.setdefault(json.dumps([row["variant"], row["recipe"]]), []).append(row)
    found, left = [], []
    for measured in runs.values():
        given = measured[0]["recipe"]
        recipe = Recipe.model_validate_json(json.dumps(given)).override({"strict": False})
        sizes = {"model.flavor": given["model"]["flavor"], "model.n_layers": recipe.model.sizes()["n_layers"],
                 "data.seq_len": given["data"]["seq_len"], "data.batch_per_rank": given["data"]["batch_per_rank"],
                 "step": given["training"]["step"], **recipe.mesh.axes}
        about = {"recipe": measured[0]["variant"], "changes": sizes, "axes": recipe.mesh.axes,
                 "passes": recipe.pass_names, "ordered_for": ordered_for(recipe),
                 "optimizer": measured[0].get("optimizer", True)}
        if why := why_not(recipe):
            left.append({**about, "why": why})
            continue
        run = simulated_step(recipe, device)
        exposed = [row["exposed_nccl_ms"] for row in measured]
        found.append({**about, "measured_ms": exposed, "simulated_ms": run.exposed_ms,
                      "error": run.exposed_ms / min(exposed) - 1,
                      "step_ms": statistics.median(row["step_ms"] for row in measured),
                      "simulated_step_ms": run.total_ms})
        print(f"{measured[0]['variant']}: {exposed} ms exposed, simulated {run.exposed_ms:.2f}; step "
              f"{found[-1]['step_ms']:.1f}, simulated {run.total_ms:.1f}", flush=True)
    return found, left


if __name__ == "__main__":
    main()
