"""Draw the tables of README.md, docs/results.md and docs/measurements from data.

    python docs/make_tables.py

A document shows the table NAME between the marks NAME:begin and NAME:end, which are HTML comments. The data are the
reports in benchmarks/results, the lessons, the recipes and the passes' contracts. No torch here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.lab.traces import read_order  # noqa: E402
from workbench.recipe.recipe import Recipe, load_recipe  # noqa: E402
from workbench.recipe.rules import cuda_reasons  # noqa: E402
from workbench.recipe.wording import mesh_text  # noqa: E402
from workbench_lessons.course.lesson import load_lesson  # noqa: E402
from workbench_lessons.course.recorded_figures import json_lines  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "docs" / "measurements").glob("*.md"))
DOCUMENTS = ["README.md", "docs/course.md", "docs/results.md", *(f"docs/measurements/{path.name}" for path in PAGES)]

Line = dict[str, Any]

PER_BLOCK = "`torch.compile` per block"
NAMES = {  # of what benchmarks/step_time.py measures, by its variants
    "eager": "torch, eager",
    "compile": PER_BLOCK,
    "compile_optimizer": "`torch.compile` of blocks and optimizer",
    "compile_keep": f"{PER_BLOCK}, weights kept",
    "compile_loss": "`torch.compile` of blocks and loss",
    "compile_keep_loss": "`torch.compile` of blocks and loss, weights kept",
    "compile_float8_tensorwise": f"{PER_BLOCK}, torchao float8, tensorwise",
    "compile_float8_rowwise": f"{PER_BLOCK}, torchao float8, rowwise",
    "reference": "torchtitan 0.2.2",
    "reference_block_bucketing": "torchtitan 0.2.2, bucketing",
    "reference_cudagraph": "torchtitan 0.2.2, replayed",
    "reference_block_bucketing_cudagraph": "torchtitan 0.2.2, bucketing, replayed",
    "llama3": "ours, no passes",
    "llama3_block_bucketing": "ours, bucketing",
    "llama3_block_bucketing_cudagraph": "ours, bucketing, replayed",
    "llama3_full_inductor": "ours, Inductor",
    "llama3_full_inductor_cudagraph": "ours, Inductor, replayed",
    "llama3_full_inductor_block_bucketing": "ours, Inductor, bucketing",
    "llama3_full_inductor_block_bucketing_cudagraph": "ours, Inductor, bucketing, replayed",
    "llama3_full_inductor_block_bucketing_overlap_cudagraph": "ours, Inductor, bucketing, overlap, replayed",
    "llama3_full_inductor_overlap_reshard_cudagraph": "ours, Inductor, bucketing, overlap, replayed, weights freed",
    "llama3_whole_step_fused": "ours, whole step",
    "llama3_whole_step_fused_cudagraph": "ours, whole step, replayed",
    "llama3_whole_step_fused_reshard_cudagraph": "ours, whole step, replayed, weights freed",
    "llama3_tp_calibrated_cudagraph": "ours, Inductor, overlap, replayed",
    "llama3_tp_async_cudagraph": "ours, the same and async tensor parallelism",
    "llama3_tp_whole_step_cudagraph": "ours, whole step, replayed",
    "llama3_tp_microbatches_cudagraph": "the same in 2 microbatches, one after the other",
    "llama3_tp_halves_cudagraph": "the same in 2 microbatches, interleaved",
    "llama3_tp_halves_copies_cudagraph": "the same, interleaved, collectives by copies",
    "llama3_float8_whole_step_cudagraph": "ours, float8, whole step, replayed",
    "llama3_float8_whole_step_rowwise": "ours, float8 rowwise, whole step, replayed",
    "llama3_float8_whole_step_gathers_bfloat16": "ours, float8, gathered in bfloat16, whole step, replayed",
    "llama3_budget_8.5": "saved tensors cut to 8.5 GiB",
    "llama3_budget_7.0": "saved tensors cut to 7 GiB",
    "llama3_budget_7.0_reshard": "cut to 7 GiB, weights freed",
    "llama3_budget_5.0_reshard": "cut to 5 GiB, weights freed",
    "llama3_full_checkpointing": "full activation checkpointing",
    "llama3_offload_hidden": "offload of what compute should hide",
    "llama3_offload_hidden_cudagraph": "offload of what compute should hide, replayed",
    "llama3_offload_all": "offload of all large saved tensors",
    "llama3_8b_budget": "saved tensors cut to 45 GiB, two sequences",
    "deepseek_v3": "ours, dropless",
    "deepseek_v3_block_bucketing": "ours, dropless, bucketing",
    "deepseek_v3_capacity_cudagraph": "ours, capacity, replayed",
    "deepseek_v3_capacity_block_bucketing_cudagraph": "ours, capacity, bucketing, replayed",
    "deepseek_v3_capacity_full_inductor_cudagraph": "ours, capacity, Inductor, replayed",
}


def load(name: str) -> Any:
    """A JSON file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def axes_of(mesh: dict[str, Any]) -> str:
    """The axes of a mesh that have more than one rank."""
    sizes = {axis: mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "ep")}
    return mesh_text({axis: size for axis, size in sizes.items() if size > 1})


def place(result: Line) -> str:
    """The machine and the torch of a result."""
    machine, torch = result["machine"], result["versions"]["torch"].split("+")[0]
    gpus = machine["gpus"]
    where = f"{len(gpus)} {gpus[0].split()[1]}" if gpus else f"{machine['cores']} CPU cores"
    return f"{where}, torch {torch}"


def source(result: Line) -> str:
    """The machine, the torch and the command of a result."""
    return f"{place(result)} (`{result['command']}`)."


def span(values: Iterable[float], unit: str) -> str:
    """The smallest and the largest value, or one where they print alike."""
    ordered = sorted(values)
    low, high = f"{ordered[0]:.1f}", f"{ordered[-1]:.1f}"
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def rounds_of(name: str, axes: str) -> dict[str, list[Line]]:
    """The rounds of each variant in benchmarks/results/NAME.jsonl on a mesh. A variant that failed has none."""
    rounds: dict[str, list[Line]] = {}
    for line in json_lines(RESULTS / f"{name}.jsonl"):
        if "step_ms" in line and axes_of(line["recipe"]["mesh"]) == axes:
            rounds.setdefault(line["variant"], []).append(line)
    return rounds


def peak(rounds: list[Line]) -> str:
    """The allocator's peak. A replay allocates nothing, so without the recording's peak nothing is known."""
    if "cudagraph" in rounds[0]["variant"] and not any("first_peak_gib" in line for line in rounds):
        return "not recorded"
    return f"{max(max(line.get('first_peak_gib', 0), line['peak_gib']) for line in rounds):.1f} GiB"


COLUMNS: dict[str, Callable[[list[Line]], str]] = {
    "step": lambda rounds: span((line["step_ms"] for line in rounds), "ms"),
    "kernels": lambda rounds: span((line["kernels_ms"] for line in rounds), "ms"),
    "exposed": lambda rounds: span((line["exposed_nccl_ms"] for line in rounds), "ms"),
    "copies exposed": lambda rounds: span((line.get("exposed_copies_ms", 0) for line in rounds), "ms"),
    "launches": lambda rounds: f"{rounds[-1]['launches']:,}",
    "reserved": lambda rounds: span((line["reserved_gib"] for line in rounds), "GiB"),
    "allocator's peak": peak,
    "copies dropped": lambda rounds: f"{rounds[-1].get('dropped', 0):.0%}",
}


def steps(columns: list[str], *groups: tuple[str, ...]) -> str:
    """Measured steps. A group is: what to say before its names, its file, its mesh, its variants (or all of NAMES)."""
    rows: list[list[str]] = []
    where: dict[str, None] = {}
    for about, name, axes, *variants in groups:
        rounds = rounds_of(name, axes)
        for variant in variants or [name for name in rounds if name in NAMES]:
            row = [NAMES[variant], *(COLUMNS[column](rounds[variant]) for column in columns)]
            rows.append([f"{about}: {row[0]}", *row[1:]] if about else row)
        first = next(iter(rounds.values()))[0]
        where[f"{place(first)}, {axes}"] = None
    return f"{table(['variant', *columns], rows)}\n\n{'; '.join(where)}."


DP, TP = "dp_shard 2", "tp 2"
WHOLE, BASE = "llama3_whole_step_fused_cudagraph", "llama3_full_inductor_block_bucketing"
LIKE = ("compile", "compile_loss", "llama3_whole_step_fused_reshard_cudagraph", "compile_keep", "compile_keep_loss",
        WHOLE)
FLOAT8 = (WHOLE, "llama3_float8_whole_step_cudagraph", "compile_float8_tensorwise")
SPEED = ["step", "exposed", "launches", "reserved"]
BUSY = ["step", "kernels", "exposed"]
COST = ["step", "allocator's peak"]
STEPS: dict[str, tuple[Any, ...]] = {  # the columns and the groups of each table of steps
    "figures": (["step"], ("8b", "like_8b_h200x2", DP, "compile", "compile_keep_loss", WHOLE),
                ("1b", "like_1b_h200x2", DP, "compile", "compile_keep_loss", WHOLE),
                ("1b", "llama3_1b_h200x2", DP, "reference_block_bucketing_cudagraph",
                 "llama3_block_bucketing_cudagraph")),
    "memory_8b": (["step", "allocator's peak", "reserved"], ("8b", "like_8b_h200x2", DP, *LIKE)),
    "memory_1b": (["step", "allocator's peak", "reserved"], (
        "1b", "like_1b_h200x2", DP, *LIKE, f"{BASE}_overlap_cudagraph",
        "llama3_full_inductor_overlap_reshard_cudagraph")),
    "replay": (["step"], ("", "llama3_1b_h200x4", "dp_shard 2 x tp 2", "compile", BASE, f"{BASE}_cudagraph",
                            "llama3_block_bucketing_cudagraph", "reference_block_bucketing_cudagraph")),
    "tp": (BUSY, ("", "llama3_1b_h200x2", TP)),
    "experts": (["step", "copies dropped"], (
        "", "deepseek_v3_debug_h200x2", "dp_shard 2 x ep 2", "eager", "deepseek_v3_block_bucketing",
        "deepseek_v3_capacity_cudagraph", "deepseek_v3_capacity_full_inductor_cudagraph")),
    "float8_steps": (["step"], ("8b", "float8_8b_h200x2", DP, *FLOAT8),
                     ("1b", "float8_h200x2", DP, *FLOAT8, "compile")),
    "memory_cost": ([*COST, "copies exposed"], (
        "", "memory_budget_h200x2", DP, f"{BASE}_cudagraph", "llama3_budget_8.5", "llama3_budget_7.0_reshard",
        "llama3_full_checkpointing"), ("", "offload_h200x2", DP, "llama3_offload_hidden_cudagraph")),
    "steps_1b": (SPEED, ("", "llama3_1b_h200x2", DP)),
    "steps_h100": (SPEED, ("", "llama3_1b_h100x2", DP, "compile_optimizer", "reference_block_bucketing_cudagraph",
                           "llama3_block_bucketing_cudagraph", f"{BASE}_cudagraph", WHOLE)),
    "steps_cpu": (["step"], ("", "llama3_debug_gloo", DP)),
    "replay_all": (SPEED, ("", "llama3_1b_h200x4", "dp_shard 2 x tp 2")),
    "tp_h100": (BUSY, ("", "llama3_1b_h100x2", TP, "compile", "reference_cudagraph", "llama3_tp_calibrated_cudagraph",
                       "llama3_tp_async_cudagraph", "llama3_tp_whole_step_cudagraph")),
    "microbatches": (BUSY, ("", "batch_split_h100x2", TP)),
    "experts_all": (["step", "launches", "copies dropped"],
                    ("2 GPUs", "deepseek_v3_debug_h200x2", "dp_shard 2 x ep 2"),
                    ("4 GPUs", "deepseek_v3_debug_h200x4", "dp_shard 2 x tp 2 x ep 2")),
    "float8_all": (["step", "exposed"], ("1b", "float8_h200x2", DP), ("8b", "float8_8b_h200x2", DP)),
    "memory_budget": (COST, ("", "memory_budget_h200x2", DP)),
    "offload": ([*COST, "copies exposed"], ("", "offload_h200x2", DP)),
    "long_sequences": (COST, ("8b, 8,192 tokens", "llama3_8b_8192_h200x2", DP)),
}


def one_gpu() -> str:
    """A step on one GPU, from traces."""
    folder, rows = RESULTS / "traces_h200", []
    lines = json_lines(folder / "steps.jsonl")
    for line in lines:
        traced = read_order([folder / f"{line['variant']}.rank0.json.gz"]).steps[-1]
        rows.append([NAMES[line["variant"]], f"{line['step_ms']:.1f} ms", f"{traced.compute_ms:.1f} ms",
                     f"{traced.idle_ms:.1f} ms", f"{traced.launches:,}", f"{line['peak_gib']:.1f} GiB"])
    heads = ["variant", "step", "kernels, traced", "idle, traced", "launches", "peak"]
    return f"{table(heads, rows)}\n\n{place(lines[0])}."


def whole_step() -> str:
    """The optimizer outside the graph and inside."""
    lines, rows = json_lines(RESULTS / "whole_step_h200x1.jsonl"), []
    for line in lines:
        where = "in the graph" if line["step"] == "whole" else "outside"
        replayed = "yes" if "cudagraph" in line["passes"] else "no"
        rows.append([where, replayed, f"{line['step_ms']:.1f} ms", f"{line['launches']:,}",
                     f"{line['peak_bytes'] / 2**30:.1f} GiB"])
    return f"{table(['optimizer', 'replayed', 'step', 'launches', 'peak'], rows)}\n\n{place(lines[-1])}."


def exposed_why() -> str:
    """What keeps the collectives of a replayed step on tp 2 from hiding."""
    paths = sorted((RESULTS / "traces_h100x2_tp2").glob("llama3_tp_calibrated_cudagraph.*"))
    last = {step.rank: step for step in read_order(paths).steps}
    reasons = {(False, False): "hidden behind compute", (False, True): "the next kernel waits for it",
               (True, False): "the kernel before it makes its input",
               (True, True): "both: nothing independent stands next to it"}
    rows = []
    for reason, text in reasons.items():
        counts, times = [], []
        for step in last.values():
            group = [c for c in step.collectives if ("starts when" in c.why, "waits for it" in c.why) == reason]
            counts.append(f"{len(group)}")
            times.append(sum(c.exposed_ms for c in group))
        rows.append([text, ", ".join(counts), span(times, "ms")])
    return table(["why a collective is exposed", "collectives, each rank", "exposed"], rows)


def low_contention() -> str:
    """Collectives beside matmuls, by NCCL and by copies."""
    result, rows = load("low_contention_h100x2"), []
    ways = {"nccl": "NCCL", "copies": "copies"}
    for row in result["rows"]:
        if row["way"] in ways:
            slower = row["products_beside"] / row["products_kernels"] - 1
            rows.append([f"{row['mesh']}, {row['kind'].replace('_', '-')}", ways[row["way"]],
                         f"{row['collectives']:.2f} ms", f"{row['exposed']:.2f} ms", f"{slower:+.0%}"])
    heads = ["collective", "by", "alone", "exposed", "the matmuls beside it"]
    return f"{table(heads, rows)}\n\n{source(result)}"


WORDS = {"transformer_block_bucketing": "bucketing", "full_inductor_compilation": "Inductor",
         "overlap_collectives": "overlap"}


def model_of(row: Line) -> str:
    """The model of a row of accuracy, its layers, and a rank's batch and sequence."""
    sizes = row["changes"]
    family = "experts" if row["recipe"].startswith("deepseek_v3") else sizes["model.flavor"]
    return (f"{family}, {sizes['model.n_layers']} layers, {sizes['data.batch_per_rank']} x "
            f"{sizes['data.seq_len']:,} tokens")


def simulated_steps() -> str:
    """Forward and backward on two H100, replayed, and as simulated: the first twelve rows, of one machine."""
    result, rows = load("accuracy_exposed_h100x2"), []
    for row in result["rows"][:12]:
        words = [WORDS[name] for name in row["passes"] if name in WORDS]
        rows.append([f"{mesh_text(row['axes'])}, {model_of(row)}", ", ".join(words) or "none",
                     f"{row['step_ms']:.1f} ms", span(row["measured_ms"], "ms"),
                     f"{row['simulated_step_ms']:.1f} ms", f"{row['simulated_ms']:.1f} ms"])
    heads = ["model", "passes", "step", "exposed", "simulated step", "exposed"]
    return f"{table(heads, rows)}\n\n{place(result)}."


def bucketing() -> str:
    """What bucketing and overlap win in compiled steps."""
    result, rows = load("accuracy_exposed_h100x2"), []
    for row in result["rows"][:9]:
        words = [WORDS[name] for name in row["passes"] if name in WORDS]
        if "Inductor" in words and "tp" not in row["axes"]:
            rows.append([model_of(row), ", ".join(words), f"{row['step_ms']:.1f} ms", span(row["measured_ms"], "ms")])
    heads = ["model", "passes", "step", "exposed"]
    return f"{table(heads, rows)}\n\n{place(result)}, dp_shard 2, forward and backward, replayed."


def accuracy(about: str, name: str, simulated: str, measured: str) -> list[str]:
    """A row of the simulation's errors, against the run that was measured shortest."""
    result, errors = load(name), []
    for row in result["rows"]:
        value = row[measured]
        shortest = min(value) if isinstance(value, list) else value
        errors.append(row[simulated] / shortest - 1)
    pairs, wrong = result["ranking"]["pairs"], len(result["ranking"]["wrong"])
    return [about, place(result), f"{len(errors)}", f"{median(map(abs, errors)):.0%}",
            f"{max(errors, key=abs):+.0%}", f"{pairs - wrong} of {pairs}"]


def simulation() -> str:
    """How far simulated figures are from measured ones."""
    rows = [accuracy("replayed steps", "accuracy_exposed_h100x2", "simulated_step_ms", "step_ms"),
            accuracy("their exposed communication", "accuracy_exposed_h100x2", "simulated_ms", "measured_ms"),
            accuracy("exposed communication of longer steps", "accuracy_exposed_h200x2", "simulated_ms", "measured_ms"),
            accuracy("kernels of one GPU", "accuracy_h200x1", "simulated_ms", "kernels_ms"),
            accuracy("small steps, launched one by one", "accuracy_launches_h200x1", "simulated_step_ms", "step_ms")]
    return table(["simulated", "measured on", "steps", "median error", "largest", "pairs ranked right"], rows)


def peaks() -> str:
    """The predicted peak of a step beside the recorded one, the closest first; equal rows once."""
    result = load("peaks")
    compared = [row for row in result["rows"] if row["recording"] and "off" in row]
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in sorted(compared, key=lambda row: abs(row["off"])):
        size = "experts" if row["variant"].startswith("deepseek_v3") else row["changes"].get("model.flavor", "1b")
        cells = [f"{size}, {axes_of(row['mesh'])}", f"{row['recorded_gib']:.2f} GiB",
                 f"{row['predicted_gib']:.2f} GiB", f"{row['off']:+.1%}"]
        rows.setdefault(tuple(cells), [f"`{row['variant']}`", *cells])
    near = sum(abs(row["off"]) < 0.05 for row in compared)
    return (f"{table(['step', 'model, mesh', 'recorded', 'predicted', 'off'], rows.values())}\n\n"
            f"{near} of {len(compared)} steps are within 5%. Predicted without a GPU: {source(result)}")


GAIN = ["bfloat16", "float8 matmuls", "casts", "gain"]


def gain(about: str, plain: float, matmuls: float, casts: float) -> list[str]:
    return [about, f"{plain:.1f} ms", f"{matmuls:.1f} ms", f"{casts:.1f} ms", f"{plain / (matmuls + casts):.2f}"]


def float8() -> str:
    """The matmuls of llama3's linear layers in bfloat16 and in float8."""
    result, rows = load("float8_products_h200"), []
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        layers = [row for row in result["rows"] if row["model"] == model]
        for kind in (*dict.fromkeys(row["layers"] for row in layers), "all"):
            group = [row for row in layers if kind in ("all", row["layers"])]
            rows.append(gain(f"{model}, {kind}", sum(row["count"] * row["bfloat16_ms"] for row in group),
                             sum(row["count"] * row["tensorwise_fast_ms"] for row in group),
                             sum(row["count"] * sum(row["tensorwise_cast_ms"]) for row in group)))
    return f"{table(['layers', *GAIN], rows)}\n\n{result['tokens']:,} tokens. {source(result)}"


def float8_experts() -> str:
    """The matmuls of deepseek_v3's experts, where all of a layer's were measured."""
    result, rows = load("float8_grouped_products_h200"), []
    for kind in dict.fromkeys((row["model"], row["dispatch"]) for row in result["rows"]):
        group = [row for row in result["rows"] if (row["model"], row["dispatch"]) == kind]
        if len(group) == 6:  # forward, dx and dw of (w1, w3) and of w2
            rows.append(gain(", ".join(kind), sum(row["bfloat16_ms"] for row in group),
                             sum(row["grouped_fast_ms"] for row in group), sum(sum(row["cast_ms"]) for row in group)))
    return f"{table(['experts', *GAIN], rows)}\n\n{place(result)}."


def float8_numerics() -> str:
    """How far gradients and losses move, by the types of the matmuls."""
    result = load("float8_numerics_gloo")
    gradients, losses = result["gradients"], result["losses"]
    plain, rows = losses["bfloat16"], []
    for name, run in losses.items():
        distances = [100 * distance for distance in gradients[name].values()]
        gap = max(abs(loss - other) for loss, other in zip(run, plain, strict=True))
        rows.append([name, span(distances, "%"), f"{sum(run[-20:]) / 20:.3f}", f"{gap:.3f}"])
    heads = ["matmuls", "gradients' distance to float64", "mean loss of the last 20 steps", "largest gap to bfloat16"]
    return f"{table(heads, rows)}\n\n{len(plain)} steps. {source(result)}"


def loss_alone() -> str:
    """The output layer and its loss alone."""
    result, rows = load("chunked_loss_h200"), []
    names = {"eager": "torch, eager", "compile": "`torch.compile`",
             "auto_chunker": "`torch.compile` with `auto_chunker`", "whole": "ours, whole",
             "chunked_loss": "ours, in pieces"}
    for row in result["rows"]:
        rows.append([names[row["way"]], f"{row['ms']:.1f} ms", f"{row['peak_gib']:.1f} GiB"])
    return (f"{table(['output layer and loss', 'time', 'peak'], rows)}\n\n{result['tokens']:,} tokens of "
            f"{result['dim']:,}, vocabulary {result['vocabulary']:,}. {source(result)}")


def outcome(recipe: str, folder: str) -> str:
    """The worst outcome in the report of a recipe's run."""
    name = f"{folder}/{recipe}.1"
    if not (RESULTS / f"{name}.json").exists():
        return "not run"
    report = load(name)
    words = {row["outcome"] for row in report["passes"]} | {"PASS" if report["ok"] else "FAIL"}
    return next(word for word in ("FAIL", "NO_EFFECT", "UNKNOWN", "PASS") if word in words)


def needs_cuda(recipe: Recipe) -> str:
    """The passes that keep a recipe from CPU ranks, or ""."""
    reasons = cuda_reasons(recipe.pass_names, recipe.model.attention)
    return "needs CUDA: " + ", ".join(f"`{name}`" for name in reasons) if reasons else ""


def recipes() -> str:
    """The recipes by their mesh and their outcomes on CPU ranks and on GPUs."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path in sorted((ROOT / "lessons" / "recipes").glob("*.toml")):
        recipe = load_recipe(path)
        on_cpu = needs_cuda(recipe) or outcome(recipe.name, "gloo")
        key = (mesh_text(recipe.mesh.axes), on_cpu, outcome(recipe.name, "h200x4"))
        groups.setdefault(key, []).append(f"`{recipe.name}`")
    rows = [[", ".join(names), *key] for key, names in groups.items()]
    return table(["recipes", "mesh", "CPU, torch 2.13", "4 H200, torch 2.11"], rows)


def captures() -> str:
    """How many recipes run from both captures, and whether they train the same parameters."""
    groups: dict[tuple[str, str], int] = {}
    for name in ("captures", "captures_h100x2", "captures_h200x2"):
        result = load(name)
        for row in result["recipes"]:
            state, text = row.get("values", ("", ""))
            trained = "bitwise the same" if "bitwise" in text else "within the passes' contracts"
            if state != "PASS":
                trained = "not run: needs CUDA"
            groups[place(result), trained] = groups.get((place(result), trained), 0) + 1
    rows = [[where, f"{count}", trained] for (where, trained), count in sorted(groups.items())]
    return table(["where", "recipes", "parameters from both captures"], rows)


FAULTS = ("an exception on one rank, the others wait", "SIGKILL of a rank", "segmentation fault of a rank",
          "out of memory", "a collective that one rank skips", "different collectives", "different shapes, checked",
          "different dtypes, checked", "endless loop", "interrupt in mid-call, number 1", "restart of the kernel")


def faults() -> str:
    """Seconds from a fault to its report, where no process was left and the next call worked."""
    results = [load(name) for name in ("faults_gloo", "faults_nccl_h200x2", "faults_nccl_h200x4")]
    seconds = {}
    for result in results:
        for row in result["faults"]:
            if row["orphans"] == 0 and row["next call works"] == "yes":
                seconds[row["fault"], row["ranks"]] = f"{row['seconds to report']} s"
    kinds = sorted({kind for _, kind in seconds}, key=lambda kind: kind.split()[::-1])
    rows = [[fault.partition(", number")[0], *(seconds.get((fault, kind), "") for kind in kinds)] for fault in FAULTS]
    return table(["what happens", *kinds], rows)


def start() -> str:
    """What a start costs, built or loaded from an artifact."""
    ways, rows = {"cold": "built", "warm": "built, Inductor's cache full", "artifact": "from an artifact"}, []
    for name in ("start_gloo", "start_h100x2", "start_h200x2"):
        result = load(name)
        for recipe in dict.fromkeys(row["recipe"] for row in result["rows"]):
            cells = []
            for way in ways:
                runs = [row for row in result["rows"] if (row["recipe"], row["way"]) == (recipe, way)]
                times = [span((row[key] for row in runs), "s") for key in ("stages", "command") if runs]
                cells.append("; all ".join(times) or "not measured")
            rows.append([f"`{recipe}`", place(result), *cells])
    return table(["recipe", "on", *ways.values()], rows)


def ranks() -> str:
    """What ranks cost beside torch's launchers."""
    result = load("ranks_gloo")
    seconds = {(row["ranks"], row["way"], row["what"]): row["seconds"] for row in result["rows"]}
    launchers = ("workbench.ranks", "torch.multiprocessing.spawn", "elastic_launch")
    rows = []
    for count in sorted({row["ranks"] for row in result["rows"]}):
        cells = [f"{seconds[count, way, 'whole']:.1f} s" for way in launchers]
        rows.append([f"{count}", *cells, f"{seconds[count, 'workbench.ranks', 'warm'] * 1e3:.0f} ms"])
    heads = ["gloo ranks", *(f"`{way}`: start, call, end" for way in launchers), "a warm call"]
    return f"{table(heads, rows)}\n\n{source(result)}"


def waits() -> str:
    """How long one waits for an answer on a model of 32 layers."""
    views, depth, what_if, overhead = (load(name) for name in ("views", "depth", "what_if", "overhead_32_layers"))
    deep = depth["rows"][-1]
    rows = [["capture", f"{deep['capture_cpu_seconds']:.1f} s of CPU"],
            ["partition", f"{deep['partition_cpu_seconds']:.1f} s of CPU"],
            ["the verdicts of level `light`, beside the passes' time", f"{overhead['light']['overhead']:+.0%}"]]
    for name, seconds in what_if["median_cpu_seconds"].items():
        rows.append([f"`what_if`, {name.replace(': ', ', ')}", f"{seconds:.1f} s of CPU"])
    for row in views["rows"]:
        rows.append([f"first paint of {row['nodes']:,} nodes, {row['view']}", f"{row['first_paint_s']:.1f} s"])
    return f"{table(['what', 'wait'], rows)}\n\nViews: {source(views)} Capture: {source(depth)}"


WITHOUT_VALUES = ("lint", "collectives", "ranks")


def planted() -> str:
    """How many planted faults the checks catch without values and with them."""
    whole = load("mutants")["whole"]
    real = whole["planted"] - whole["equivalent"]
    light = sum(whole[check] for check in WITHOUT_VALUES)
    full = light + whole["numerics"] + whole["running"]
    rows = [["without values (level `light`)", f"{light:,} of {real:,}", f"{light / real:.0%}"],
            ["with values (level `full`)", f"{full:,} of {real:,}", f"{full / real:.2%}"]]
    return table(["checks", "planted faults caught", "share"], rows)


def source_mutants() -> str:
    """Faults planted in the core's own source: how many the unit tests reach and catch, and the others."""
    result = load("source_mutants")
    head = [["planted", str(result["planted"])], ["reached by a unit test", str(result["reached"])],
            ["caught by one", str(result["caught"])]]
    left = [[f"`{row['fault']}`", str(row["tests"])] for row in result["not caught"]]
    tables = table(["faults in the core's source", ""], head), table(["not caught", "tests that reach it"], left)
    return "\n\n".join(tables)


def mutants() -> str:
    """Planted faults by their kind, and those that nothing caught."""
    result = load("mutants")
    kinds: dict[str, list[Line]] = {}
    for operator in result["operators"].values():
        kinds.setdefault(operator["kind"], []).append(operator)
    rows = []
    for kind, operators in [*sorted(kinds.items()), ("all", [result["whole"]])]:
        light = sum(operator[check] for operator in operators for check in WITHOUT_VALUES)
        values = sum(operator["numerics"] + operator["running"] for operator in operators)
        sums = [sum(operator[key] for operator in operators) for key in ("planted", "equivalent", "false_pass")]
        rows.append([kind, f"{sums[0]}", f"{light}", f"{values}", f"{sums[1]}", f"{sums[2]}"])
    heads = ["fault in", "planted", "caught without values", "caught by values", "equal", "missed"]
    missed = [[f"`{row['key']}`", row["why"]] for row in result["survivors"]]
    parts = [table(heads, rows), table(["missed", "why"], missed)] if missed else [table(heads, rows)]
    torch = result["torch"].split("+")[0]
    return "\n\n".join([*parts, f"2 gloo ranks, torch {torch}, seed {result['seed']} (`{result['command']}`)."])


def lessons() -> str:
    """The lessons, each with its question."""
    rows = []
    for path in sorted((ROOT / "lessons").glob("l*/lesson.toml")):
        lesson = load_lesson(path)
        number = lesson.name.partition("_")[0]
        link = f"[{number} {lesson.title}](../notebooks/{lesson.name}.ipynb)"
        rows.append([link, lesson.question, f"{lesson.minutes} min"])
    return table(["lesson", "question", "time"], rows)


def museum() -> str:
    """The exhibits of the bug museum in the lessons."""
    rows = []
    for path in sorted((ROOT / "lessons").glob("l*/lesson.toml")):
        lesson = load_lesson(path)
        number = lesson.name.partition("_")[0]
        link = f"[{number}](../../notebooks/{lesson.name}.ipynb)"
        rows += [[exhibit.bug, exhibit.seen, exhibit.caught, link] for exhibit in lesson.museum]
    for row in json_lines(RESULTS / "graph_trainer_passes_cpu.jsonl"):
        if "exhibit" in row:
            rows.append([row["bug"], row["seen"], row["caught"], "[page](graph_trainer.md)"])
    return table(["what went wrong", "where it was seen", "what would have caught it", "shown in"], rows)


LISTS = {  # of benchmarks/graph_trainer_passes.py
    "default": "Their default list, with full recomputation, a second group for gathers and async tensor parallelism:",
    "offload": "Offloading of all large activations but the last layer's:",
    "inductor": "Inductor compiles loss and gradients as one:",
}


def graph_trainer(file: str) -> str:
    """Passes of torchtitan's graph_trainer on each recipe: nodes, launches, and the outcome of each check."""
    path = RESULTS / f"{file}.jsonl"
    if not path.exists():
        return "Not run yet."
    lines = [line for line in json_lines(path) if "list" in line]
    recipes = {line["recipe"]["name"]: f"{_family(line)}, {axes_of(line['recipe'].get('mesh', {}))}" for line in lines}
    texts = []
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for line in lines:
        if "refused" in line:
            reason = re.sub(r", in [\w<>]+: .*\)$", ")", line["refused"])
            refused.setdefault((line["pass"], reason), {})[recipes[line["recipe"]["name"]]] = None
    for name, title in LISTS.items():
        listed = [line for line in lines if line["list"] == name]
        without = {(line["recipe"]["name"], line["pass"]) for line in listed if "refused" in line}
        heads = ["pass", *recipes.values(), "lint", "effect", "collectives", "numerics"]
        rows = []
        for passed in dict.fromkeys(line["pass"] for line in listed if "nodes" in line):
            of_pass = {line["recipe"]["name"]: line for line in listed if line["pass"] == passed and "nodes" in line}
            cells = []
            for recipe in recipes:
                absent = "refused" if {(recipe, passed), (recipe, "")} & without else "not run"
                cells.append(_sizes(of_pass[recipe]) if recipe in of_pass else absent)
            rows.append([f"`{passed}`", *cells, *_outcomes(list(of_pass.values()), heads[-4:])])
        steps = [line for line in listed if not line["pass"] and "verdicts" in line]
        if steps:
            rows.append(["the step", *[""] * len(recipes), *_outcomes(steps, heads[-4:])])
        texts.append(f"{title}\n\n{table(heads, rows)}")
    if refused:
        rows = [[f"`{passed}`", "; ".join(where), reason] for (passed, reason), where in refused.items()]
        texts.append(table(["refused", "recipe", "reason"], rows))
    most = max(line["ranks"] for line in lines)
    texts.append(f"Cells: nodes; launches. At most {most} {lines[0]['world']} ranks, torchtitan "
                 f"{lines[0]['versions']['torchtitan']}, {source(lines[0])}")
    return "\n\n".join(texts)


def graph_trainer_found() -> str:
    """The exhibits of graph_trainer, and what the verdicts say of each."""
    lines = [line for line in json_lines(RESULTS / "graph_trainer_passes_cpu.jsonl") if "exhibit" in line]
    rows = [[line["bug"], line["seen"], f"`{line['verdict']}`", line["caught"]] for line in lines]
    return table(["what goes wrong", "where", "told here", "what would have caught it"], rows)


def _family(line: Line) -> str:
    family = line["recipe"]["model"].get("family", "llama3")
    precision = line["recipe"].get("precision", {}).get("param")
    return f"{family} in {precision}" if precision else family


def _sizes(line: Line) -> str:
    sides = ([f"{size:,}" for size in dict.fromkeys(line[key])] for key in ("nodes", "launches"))
    return "; ".join(" to ".join(side) for side in sides)


def _outcomes(lines: list[Line], checks: list[str]) -> list[str]:
    """Of each check: the outcome on all recipes, or one for each where they differ."""
    cells = []
    for check in checks:
        outcomes = [line["verdicts"].get(check, "") for line in lines]
        cells.append(outcomes[0] if len(set(outcomes)) == 1 else ", ".join(outcomes))
    return cells


CAUSAL = {  # variants of benchmarks/causal_attention.py
    "fsdp2_per_block_compile": f"FSDP2, {PER_BLOCK}",
    "fsdp2_per_block_compile_loss": "FSDP2, `torch.compile` of blocks and loss",
    "backend_causal": "ours, adopted, under `torch.compile`, mask dropped",
    "cudagraph": "ours, adopted, replayed",
    "cudagraph_causal": "ours, adopted, replayed, mask dropped",
    "whole_step_causal": "ours, adopted, whole step, replayed, mask dropped",
}


def causal_mask() -> str:
    """A Hugging Face Llama with its mask and without: two calls on two machines, each with the peer in it."""
    rows = [row for row in json_lines(RESULTS / "causal_attention_h200x1.jsonl") if row["call"] > 2]
    calls = sorted({row["call"] for row in rows})
    cells = [[str(1 + calls.index(row["call"])), CAUSAL[row["variant"]], f"{row['step_ms']:.1f} ms",
              f"{row['attention_ms']:.1f} ms", f"{row['peak_gib']:.1f} GiB"] for row in rows]
    return table(["call", "variant", "step", "of it attention", "allocator's peak"], cells)


DRAWN: dict[str, Callable[[], str]] = {
    "lessons": lessons, "museum": museum, "one_gpu": one_gpu, "whole_step": whole_step,
    "exposed_why": exposed_why, "low_contention": low_contention, "simulation": simulation, "peaks": peaks,
    "float8": float8, "float8_experts": float8_experts, "float8_numerics": float8_numerics, "loss_alone": loss_alone,
    "recipes": recipes, "captures": captures, "faults": faults, "start": start, "ranks": ranks, "waits": waits,
    "planted": planted, "mutants": mutants,
    "source_mutants": source_mutants, "bucketing": bucketing, "simulated_steps": simulated_steps,
    "causal_mask": causal_mask,
    "graph_trainer_cpu": lambda: graph_trainer("graph_trainer_passes_cpu"),
    "graph_trainer_found": graph_trainer_found,
    "graph_trainer_gpu": lambda: graph_trainer("graph_trainer_passes_h200x1"),
}


def tables() -> dict[str, str]:
    """The tables by the name of their place, as Markdown."""
    drawn = {name: draw() for name, draw in DRAWN.items()}
    return drawn | {name: steps(columns, *groups) for name, (columns, *groups) in STEPS.items()}


def places(text: str) -> list[str]:
    """The names of the tables that a document shows, in order."""
    return re.findall(r"<!-- (\w+):begin -->", text)


def with_tables(text: str, drawn: dict[str, str], name: str) -> str:
    """The text of the document `name` with what stands between each pair of marks replaced."""
    for place in places(text):
        begin, end = f"<!-- {place}:begin -->", f"<!-- {place}:end -->"
        before, _, rest = text.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise SystemExit(f"{name}: no {end} after {begin}")
        if place not in drawn:
            raise SystemExit(f"{name}: {begin}: no such table: one of {', '.join(sorted(drawn))}")
        text = f"{before}{begin}\n{drawn[place]}\n{end}{after}"
    return text


def documents() -> dict[str, str]:
    """Each document's text with its tables as the data are now."""
    drawn = tables()
    return {name: with_tables((ROOT / name).read_text(encoding="utf-8"), drawn, name) for name in DOCUMENTS}


def main() -> None:
    for name, text in documents().items():
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
