"""Write what README.md and docs/measurements draw from data: the tables between their markers, and the pictures
in docs.

    python docs/make_tables.py

Tables come from lessons, lessons/recipes, the passes' contracts and the reports in benchmarks/results, which
`workbench run RECIPE --json FILE` writes. No torch here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.lab.traces import read_order  # noqa: E402
from workbench.lab.traces.trace_file import read_trace  # noqa: E402
from workbench.notebook.lessons.lesson import load_lesson  # noqa: E402
from workbench.recipe.contracts import CONTRACTS, Numerics, PassContract  # noqa: E402
from workbench.recipe.files import json_lines  # noqa: E402
from workbench.recipe.recipe import Recipe, load_recipe  # noqa: E402
from workbench.recipe.rules import cuda_reasons  # noqa: E402
from workbench.recipe.wording import mesh_text  # noqa: E402
from workbench.torch_api.devices.profile import MACHINES, load_profile  # noqa: E402

NOT_MEASURED = "not measured yet"
STEP = "1b model, 4 H200, a step"
USUAL = "dp_shard 2 x tp 2"  # of that column
WHERE = ["CPU, gloo", "GPU, nccl"]
PEERS = {
    "eager": "torch: eager FSDP2 + TP", "compile": "torch: FSDP2 + TP, each block by `torch.compile`",
    "compile_optimizer": "torch: FSDP2 + TP, each block and the optimizer's step by `torch.compile`",
    "reference": "torchtitan 0.2.2 compiler toolkit, no passes",
    "reference_block_bucketing": "the same, block bucketing",
    "reference_full_inductor": "the same, full Inductor",
    "reference_flex_block_bucketing_regional": "the same, FlexAttention, block bucketing and regional Inductor",
    "reference_cudagraph": "the same, cudagraph",
    "reference_block_bucketing_cudagraph": "the same, block bucketing and cudagraph",
}
TORCHAO = {
    "compile_float8_tensorwise": "torch: FSDP2, each block by `torch.compile`, torchao's float8, tensorwise",
    "compile_float8_rowwise": "torch: FSDP2, each block by `torch.compile`, torchao's float8, rowwise",
}
STEPS = (  # what goes in, and the public function that takes it on
    ("Recipe", "author"), ("model on a World", "capture"), ("JointGraph", "run_joint"), ("JointGraph", "partition"),
    ("ForwardBackward", "run_partitioned"), ("ForwardBackward", "compile_step"), ("CompiledStep", "train"),
    ("Report", ""),
)
PASSES = ("run_joint", "run_partitioned")
DOCUMENTS = ["README.md", "docs/results.md", *(
    f"docs/measurements/{path.name}" for path in sorted((ROOT / "docs" / "measurements").glob("*.md")))]


def reports(folder: Path) -> list[dict[str, Any]]:
    """The files of `folder` that are reports of a run; other results lie there too."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))]
    keys = {"recipe", "world", "level", "ok", "versions", "passes"}
    return [data for data in found if isinstance(data, dict) and keys <= set(data)]


def cell(runs: list[dict[str, Any]], kind: str, name: str = "") -> str:
    """What the reports on a kind of world say, each outcome once: of the whole run, or of the pass `name`.

    What passes on more ranks need not be said of fewer.
    """
    said = []
    for run in runs:
        rows = {row["name"]: row["outcome"] for row in run["passes"]}
        if run["world"]["kind"] == kind and (not name or name in rows):
            whole = "FAIL" if not run["ok"] else "NO_EFFECT" if "NO_EFFECT" in rows.values() else "PASS"
            outcome = rows[name] if name else whole
            where = f"{run['world']['size']} ranks, torch {run['versions']['torch'].split('+')[0]}"
            if not name and (step := run.get("median_step_seconds")):
                where += f", a step {step * 1e3:,.0f} ms"
            said.append((outcome, run["world"]["size"], f"{outcome} ({run['level']}): {where}"))
    most = max((size for _, size, _ in said), default=0)
    return "; ".join(dict.fromkeys(text for outcome, size, text in said if outcome != "PASS" or size == most)
                     ) or NOT_MEASURED


def needs_cuda(recipe: Recipe) -> str:
    """What keeps a recipe from CPU ranks, or ""."""
    found = cuda_reasons(recipe.pass_names, recipe.model.attention)
    return "needs CUDA: " + "; ".join(f"`{name}`, {why}" for name, why in found.items()) if found else ""


def step_times(path: Path) -> dict[str, str]:
    """Each run's step time by variant, as the variant is; a line with changed settings is another variant.

    A recipe that has axes of its own says them.
    """
    lines = json_lines(path) if path.exists() else []
    times: dict[str, list[str]] = {}
    axes = {}
    for line in lines:
        if "step_ms" in line and not line["changes"]:
            times.setdefault(line["variant"], []).append(f"{line['step_ms']:.1f}")
            axes[line["variant"]] = axes_of(line["recipe"])
    return {name: f"{', '.join(found)} ms" + (f" ({axes[name]})" if axes[name] != USUAL else "")
            for name, found in times.items()}


def axes_of(recipe: dict[str, Any]) -> str:
    """The mesh axes of more than one rank of a recipe in a result."""
    sizes = {axis: recipe["mesh"].get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "ep")}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def recipe_row(recipe: Recipe, runs: list[dict[str, Any]], steps: dict[str, str]) -> list[str]:
    passes = ", ".join(f"`{name}`" for name in recipe.pass_names) or "none"
    own = [run for run in runs if run["recipe"]["name"] == recipe.name]
    return [f"`{recipe.name}`", mesh_text(recipe.mesh.axes), passes,
            needs_cuda(recipe) or cell(own, "gloo"), cell(own, "nccl"),
            "see below" if recipe.model.family != "llama3" else steps.get(recipe.name, NOT_MEASURED)]


def pass_row(contract: PassContract, runs: list[dict[str, Any]]) -> list[str]:
    bound = f" {contract.tolerance:g}" if contract.numerics is Numerics.LOSSY else ""
    return [f"`{contract.name}`", str(contract.stage), f"{contract.numerics}{bound}",
            ", ".join(sorted(contract.needs)) or "nothing",
            "needs CUDA" if "cuda" in contract.needs else cell(runs, "gloo", contract.name),
            cell(runs, "nccl", contract.name)]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(root: Path = ROOT) -> dict[str, str]:
    """The tables by the name of their place, as Markdown."""
    return {"recipes": recipes_table(root), "passes": passes_table(root), "peers": peers_table(root),
            "ranks": ranks_table(root), "faults": faults_table(root), "views": views_table(root),
            "timelines": timelines_table(root), "accuracy": accuracy_table(root),
            "accuracy_launches": accuracy_launches_table(root),
            "accuracy_exposed": accuracy_exposed_table(root, "h200x2"),
            "accuracy_steps": accuracy_exposed_table(root, "h100x2"), "experts": experts_table(root),
            "experts_step": experts_step_table(root),
            "steps_1b": gpu_steps_table(root, "llama3_1b_h200x2.jsonl"),
            "steps_h100": gpu_steps_table(root, "llama3_1b_h100x2.jsonl"), "exposed_tp2": exposed_tp2_table(root),
            "steps_8b": gpu_steps_table(root, "llama3_8b_h200x2.jsonl"), "cpu_steps": cpu_steps_table(root),
            "start": start_table(root),
            "same_passes": same_passes_table(root),
            "lessons": lessons_table(root), "museum": museum_table(root),
            "figures": figures_table(root), "depth": depth_table(root), "what_if": what_if_table(root),
            "mutants": mutants_table(root), "soak": soak_table(root), "one_gpu": one_gpu_table(root),
            "peaks": peaks_table(root), "captures": captures_table(root), "whole_step": whole_step_table(root),
            "update_cost": update_cost_table(root),
            "float8": float8_table(root), "float8_grouped": float8_grouped_table(root),
            "float8_numerics": float8_numerics_table(root),
            "chunked_loss": chunked_loss_table(root), "float8_steps": choices_table(root, "float8_h200x2.jsonl"),
            "float8_budget": choices_table(root, "float8_budget_h200x2.jsonl"),
            "float8_budget_h100": choices_table(root, "float8_budget_h100x2.jsonl"),
            "float8_kernels": float8_kernels_table(root),
            "float8_8b": choices_table(root, "float8_8b_h200x2.jsonl"),
            "saved_values": choices_table(root, "saved_values_h200x2.jsonl"),
            "long_sequences": choices_table(root, "llama3_8b_8192_h200x2.jsonl"),
            "offload": choices_table(root, "offload_h200x2.jsonl"),
            "low_contention": low_contention_table(root), "contention": contention_table(),
            "batch_split": gpu_steps_table(root, "batch_split_h100x2.jsonl"),
            "offload_planned": choices_table(root, "offload_h100x2.jsonl"),
            "memory_budget": choices_table(root, "memory_budget_h200x2.jsonl")}


def lessons_table(root: Path = ROOT) -> str:
    """The lessons, each with its question."""
    rows = [[f"[{each.name[:2]} {each.title}](notebooks/{each.name}.ipynb)", each.question, f"{each.minutes} min"]
            for each in lessons(root)]
    return table(["lesson", "question", "time"], rows)


def museum_table(root: Path = ROOT) -> str:
    """The exhibits of the bug museum in the lessons; docs/measurements/bug_museum.md shows it."""
    rows = [[exhibit.bug, exhibit.seen, exhibit.caught, f"[{each.name[:2]}](../../notebooks/{each.name}.ipynb)"]
            for each in lessons(root) for exhibit in each.museum]
    return table(["what went wrong", "where it was seen", "what would have caught it", "lesson"], rows)


def lessons(root: Path = ROOT) -> list[Any]:
    """The lessons in order."""
    return [load_lesson(path) for path in sorted((root / "lessons").glob("l*/lesson.toml"))]


def recipes_table(root: Path = ROOT) -> str:
    """Each recipe with its outcome on CPU ranks and on GPUs, and its 1b model's step."""
    folder = root / "benchmarks" / "results"
    runs, steps = reports(folder), step_times(folder / "llama3_1b_h200x4.jsonl")
    recipes = [load_recipe(path) for path in sorted((root / "lessons" / "recipes").glob("*.toml"))]
    return table(["recipe", "mesh", "passes", *WHERE, STEP], [recipe_row(recipe, runs, steps) for recipe in recipes])


def passes_table(root: Path = ROOT) -> str:
    """Each pass with its contract, and its outcome on CPU ranks and on GPUs."""
    runs = reports(root / "benchmarks" / "results")
    return table(["pass", "stage", "numerics", "needs", *WHERE],
                 [pass_row(contract, runs) for contract in CONTRACTS.values() if contract.source != "user"])


def peers_table(root: Path = ROOT) -> str:
    """What torch itself and torchtitan take for the same step."""
    steps = step_times(root / "benchmarks" / "results" / "llama3_1b_h200x4.jsonl")
    return table(["others, from the same initial values", STEP],
                 [[said, steps.get(name, NOT_MEASURED)] for name, said in PEERS.items()])


def experts_table(root: Path = ROOT) -> str:
    """DeepSeek v3 beside its peers, from benchmarks/results/deepseek_v3_*.jsonl: each run of a variant in order."""
    parts = []
    for path in sorted((root / "benchmarks" / "results").glob("deepseek_v3_*.jsonl")):
        lines = json_lines(path)
        runs: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if "step_ms" in line:
                runs.setdefault(line["variant"], []).append(line)
        said = {name: text.replace("+ TP", "+ EP").replace("the same", "torchtitan 0.2.2")
                for name, text in PEERS.items()}
        rows = [[said.get(name, f"`{name}`"),
                 ", ".join(f"{run['step_ms']:.1f} ms" for run in found), str(found[-1]["launches"]),
                 f"{found[-1]['peak_gib']:.1f} GiB", f"{found[-1].get('dropped', 0.0):.0%}"]
                for name, found in sorted(runs.items(), key=lambda item: item[0] not in PEERS)]
        gpus, torch = lines[0]["machine"]["gpus"], lines[0]["versions"]["torch"].split("+")[0]
        heads = ["variant", "a step, each run", "launches", "peak", "copies dropped"]
        parts.append(f"{table(heads, rows)}\n\n{len(gpus)} {gpus[0]}, torch {torch}, {axes_of(lines[0]['recipe'])}.")
    return "\n\n".join(parts)


def said_of(line: dict[str, Any]) -> str:
    """What a line of benchmarks/step_time.py measured: a peer, or the passes of ours."""
    if line["variant"] in PEERS:
        return PEERS[line["variant"]].replace("the same", "torchtitan 0.2.2")
    if "recipe" not in line:
        return f"`{line['variant']}`"
    options = [{"name": each} if isinstance(each, str) else each for each in line["recipe"]["passes"]]
    passes = [f"`{each['name']}`" + (f" (by `{each['device']}`)" if "device" in each else "") + options_of(each)
              for each in options]
    training, said = line["recipe"]["training"], "ours: " + (", ".join(passes) or "no passes")
    if training.get("step") == "whole":
        said += "; the whole step in one graph"
    return said + (f", {count} microbatches" if (count := training.get("accumulate", 1)) > 1 else "")


Runs = dict[tuple[str, str], list[dict[str, Any]]]


def steps_of(root: Path, name: str, said: Callable[[dict[str, Any]], str] = said_of) -> tuple[Runs, str]:
    """The rounds of a file of benchmarks/step_time.py by mesh axes and what is said of them; and where they ran."""
    path = root / "benchmarks" / "results" / name
    lines = json_lines(path)
    runs: Runs = {}
    axes = ""
    for line in lines:
        axes = axes_of(line["recipe"]) if "recipe" in line else axes
        runs.setdefault((axes, said(line)), []).append(line)
    machine, torch = lines[0]["machine"], lines[0]["versions"]["torch"].split("+")[0]
    gpus = machine["gpus"]
    where = f"{len(gpus)} {gpus[0]}" if gpus else f"{machine['cores']} cores of {machine['cpu']}"
    return runs, f"{where}, torch {torch}"


def each_run(found: list[dict[str, Any]], key: str) -> str:
    return ", ".join(f"{run[key]:.1f} ms" for run in found)


def gpu_steps_table(root: Path, name: str) -> str:
    """Steps on GPUs: their kernels, their communication, and what they keep reserved."""
    runs, where = steps_of(root, name)
    rows = []
    for (axes, said), found in sorted(runs.items(), key=lambda item: item[0][0]):
        if problem := found[-1].get("problem"):
            rows.append([axes, said, f"not measured: {problem}", *[""] * 5])
            continue
        rows.append([axes, said, *(each_run(found, key) for key in ("step_ms", "kernels_ms", "nccl_ms",
                                                                    "exposed_nccl_ms")),
                     f"{found[-1]['launches']:,}", f"{found[-1]['reserved_gib']:.1f} GiB"])
    heads = ["mesh", "variant", "a step, each run", "compute kernels", "NCCL", "of it exposed", "launches",
             "memory reserved"]
    return f"{table(heads, rows)}\n\n{where}."


CHOICES = ("float8_matmul", "memory_budget", "reshard_after_forward", "activation_checkpointing", "chunked_loss",
           "offload_activations")


def options_of(options: dict[str, Any]) -> str:
    """A pass's options but for its machine, in brackets."""
    told = [f"{key} {value if not isinstance(value, list) else ', '.join(value)}".lower()
            for key, value in options.items() if key not in ("name", "device")]
    return f" ({'; '.join(told)})" if told else ""


def choice_of(line: dict[str, Any]) -> str:
    """What a line's recipe chooses beside the passes that all of its table have: joint passes, offloading, the step."""
    if line["variant"] in PEERS | TORCHAO or "recipe" not in line:
        return (PEERS | TORCHAO).get(line["variant"], line["variant"])
    recipe = line["recipe"]
    said = []
    for each in (*recipe.get("joint_passes", ()), *recipe["passes"]):
        name, options = (each, {}) if isinstance(each, str) else (each["name"], each)
        if name in CHOICES:
            said.append(f"`{name}`" + options_of(options))
    said += [line["tree"]] if "tree" in line else []
    return (", ".join(said) or "as it is") + ("; replayed" if "cudagraph" in recipe["passes"] else "") + (
        "; the whole step in one graph" if recipe["training"].get("step") == "whole" else "") + (
        f"; {batch} sequences a rank" if (batch := line["changes"].get("data.batch_per_rank", "1")) != "1" else "")


def choices_table(root: Path, name: str) -> str:
    """Steps of benchmarks/step_time.py that differ in a choice of memory or precision: time beside memory."""
    runs, where = steps_of(root, name, choice_of)
    rows = [[said, *(each_run(found, key) for key in ("step_ms", "kernels_ms", "exposed_nccl_ms")),
             each_run(found, "exposed_copies_ms") if found[0].get("copies_ms") else "",
             f"{saved:.1f} GiB" if (saved := found[0].get("saved_gib")) else "",
             f"{max(max(run.get('first_peak_gib', 0.0), run['peak_gib']) for run in found):.1f} GiB",
             f"{max(run['peak_gib'] for run in found):.1f} GiB" if said.endswith("; replayed") else ""]
            for (_, said), found in runs.items() if "step_ms" in found[0]]
    heads = ["choice", "a step, each run", "compute kernels", "NCCL exposed", "copies exposed", "saved", "peak",
             "of it in replayed steps"]
    full = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    (axes, _), *_ = runs
    return f"{table([heads[i] for i in full], [[row[i] for i in full] for row in rows])}\n\n{where}, {axes}."


def chunked_loss_table(root: Path = ROOT) -> str:
    """The output layer and its loss alone, and in a step of two layers."""
    found = json.loads((root / "benchmarks" / "results" / "chunked_loss_h200.json").read_text(encoding="utf-8"))
    said = {"eager": "torch, eager", "compile": "`torch.compile`",
            "auto_chunker": "`torch.compile` with `auto_chunker`", "whole": "ours, whole",
            "chunked_loss": "ours, the former pass `chunked_loss`", "pieces": "ours, `model.loss`",
            "pieces_compile": "`torch.compile` of `ChunkedLoss`"}
    rows = [[said[row["way"]], f"{row['ms']:.1f} ms", f"{row['peak_gib']:.1f} GiB"] for row in found["rows"]]
    sizes = f"{found['tokens']:,} tokens of {found['dim']:,}, vocabulary {found['vocabulary']:,}"
    alone = table(["output layer and loss, both directions", "time", "peak"], rows)
    return (f"{alone}\n\n{sizes}. {of_gpu(found)}.\n\n"
            f"{choices_table(root, 'chunked_loss_h200x2.jsonl')}")


FAMILIES = {  # of kernels, by their names
    "NCCL": "nccl", "matrix products": "nvjet|gemm", "attention": "sdpa", "SiLU": "silu_kernel",
    "loss": "log_softmax|LogSoftMax|nll", "optimizer and clipping": "FusedAdam|LpNorm|BinaryOpScalar",
    "": "",
}


def family(kernel: str, marks: Mapping[str, str]) -> str:
    """The first of the families whose pattern is found in a kernel's name."""
    return next(name for name, pattern in marks.items() if re.search(pattern, kernel))


def same_passes_table(root: Path = ROOT) -> str:
    """Where torchtitan's block bucketing and cudagraph is faster, by kernels of the traces of rank 0."""
    folder = root / "benchmarks" / "results" / "traces_h200x2"
    found: list[dict[str, list[float]]] = []
    for variant in ("llama3", "reference"):
        spent: dict[str, list[float]] = {name: [] for name in FAMILIES}
        for event in read_trace(folder / f"{variant}_block_bucketing_cudagraph.rank0.json.gz").steps[-1].events:
            spent[family(event.name, FAMILIES)].append((event.end - event.begin) / 1e3)
        found.append(spent)
    ours, theirs = found
    rows = [[name or "all others: casts, copies, rotary embedding, sums",
             *(f"{sum(spent[name]):.1f} ms in {len(spent[name])}" for spent in found),
             f"{sum(ours[name]) - sum(theirs[name]):+.1f} ms"] for name in FAMILIES]
    return table(["kernels", "ours", "torchtitan 0.2.2", "difference"], rows)


def contention_table() -> str:
    """What products and collectives cost each other, by the machines that measured all three figures of it."""
    rows = []
    for path in sorted(MACHINES.glob("*.json")):
        profile = load_profile(path)
        if profile.product_delays is not None:
            rows.append([f"`{path.stem}`", f"{profile.product_delays:.0%} of the product's time",
                         f"{profile.collective_slowdown:.2f} times", f"{profile.compute_slowdown:.2f} times"])
    return table(["machine", "an all-gather launched right after a product ends later by",
                  "an all-gather that began first takes", "and the products beside it"], rows)


def low_contention_table(root: Path = ROOT) -> str:
    """Collectives beside products, NCCL's and copies, from benchmarks/results/low_contention_h100x2.json."""
    found = json.loads((root / "benchmarks" / "results" / "low_contention_h100x2.json").read_text(encoding="utf-8"))
    rows = [[row["mesh"], f"{row['kind'].replace('_', '-')} of {row['bytes'] / 1e6:.0f} MB", WAYS[row["way"]],
             *(f"{row[key]:.2f} ms" for key in ("products", "collectives", "both", "exposed")),
             f"{row['products_beside'] / row['products_kernels'] - 1:+.0%}"] for row in found["rows"]]
    heads = ["mesh", "collective", "by", "products alone", "collectives alone", "together", "exposed",
             "the products' kernels beside them"]
    return f"{table(heads, rows)}\n\nTwo layers, replayed. {of_gpu(found)}."


WAYS = {"nccl": "NCCL", "copies": "copies, after one into symmetric memory",
        "symmetric": "copies, of what is in symmetric memory"}


def exposed_tp2_table(root: Path = ROOT) -> str:
    """What keeps the collectives of a replayed step on tp 2 from hiding, from its traces on two GPUs."""
    folder = root / "benchmarks" / "results" / "traces_h100x2_tp2"
    steps = read_order(sorted(folder.glob("llama3_tp_calibrated_cudagraph.*"))).steps
    kinds = {(False, False): "hidden behind compute", (False, True): "the next kernel waits for it",
             (True, False): "its input is made by the kernel before it",
             (True, True): "its input is made by the kernel before it, and the next kernel waits for it"}
    ranks = [next(step for step in reversed(steps) if step.rank == rank) for rank in (0, 1)]
    rows = []
    for kind, said in kinds.items():
        found = [[c for c in step.collectives if ("starts when" in c.why, "waits for it" in c.why) == kind]
                 for step in ranks]
        rows.append([said, ", ".join(f"{len(each)}" for each in found),
                     ", ".join(f"{sum(c.exposed_ms for c in each):.1f} ms" for each in found)])
    return table(["why a collective is exposed", "collectives, each rank", "exposed, each rank"], rows)


def cpu_steps_table(root: Path = ROOT) -> str:
    """Steps on CPU ranks, peers and ours, from benchmarks/results/llama3_debug_gloo.jsonl."""
    runs, where = steps_of(root, "llama3_debug_gloo.jsonl")
    rows = [[axes, said, each_run(found, "step_ms")] for (axes, said), found in runs.items()]
    return f"{table(['mesh', 'variant', 'a step, each run'], rows)}\n\n{where}."


def figures_table(root: Path = ROOT) -> str:
    """README's three figures: the best steps beside the peers' best, and one list of passes that a peer runs faster."""
    (large, where), (small, _) = (steps_of(root, f"llama3_{flavor}_h200x2.jsonl") for flavor in ("8b", "1b"))

    def best(runs: Runs, peer: bool) -> str:
        mine = [(said, found) for (axes, said), found in runs.items()
                if axes == "dp_shard 2" and said.startswith("ours") is not peer and "step_ms" in found[-1]]
        said, found = min(mine, key=lambda item: min(run["step_ms"] for run in item[1]))
        return f"{each_run(found, 'step_ms')} ({said.removeprefix('ours: ')})"

    blocks = [small["dp_shard 2", said] for said in (
        "ours: `transformer_block_bucketing`, `cudagraph`", "torchtitan 0.2.2, block bucketing and cudagraph")]
    ours, theirs = (min(run["step_ms"] for run in found) for found in blocks)
    rows = [["llama3 8b, a sequence of 4,096 tokens a rank", best(large, False), best(large, True)],
            ["llama3 1b, 4 sequences of 2,048 tokens a rank", best(small, False), best(small, True)],
            ["the same 1b, block bucketing and cudagraph alone", each_run(blocks[0], "step_ms"),
             f"{each_run(blocks[1], 'step_ms')} (torchtitan 0.2.2)"]]
    told = (f"{where}, dp_shard 2, bfloat16; the median step of each run. Ours replay CUDA graphs; `torch.compile` by "
            "blocks launches each kernel." + " In the last row the peer is faster." * (theirs < ours))
    return f"{table(['a step of', 'here', 'peer'], rows)}\n\n{told}"


def ranks_table(root: Path = ROOT) -> str:
    """What ranks cost beside torch's own launchers, from benchmarks/results/ranks_gloo.json."""
    found = json.loads((root / "benchmarks" / "results" / "ranks_gloo.json").read_text(encoding="utf-8"))
    times = {(row["ranks"], row["way"], row["what"]): row["seconds"] for row in found["rows"]}
    columns = [("workbench.ranks", "whole"), ("torch.multiprocessing.spawn", "whole"), ("elastic_launch", "whole"),
               ("workbench.ranks", "warm")]
    rows = [[f"{n}", *(f"{times[n, way, what] * 1e3:,.{1 if what == 'warm' else 0}f} ms" for way, what in columns)]
            for n in sorted({row["ranks"] for row in found["rows"]})]
    heads = [f"{way}: start, a call, end" if what == "whole" else "a warm call" for way, what in columns]
    machine, versions = found["machine"], found["versions"]
    said = f"{machine['cores']} cores of {machine['cpu']}, torch {versions['torch'].split('+')[0]}"
    return f"{table(['gloo ranks', *heads], rows)}\n\n{said}; medians of {found['repeats']} (`{found['command']}`)."


def start_table(root: Path = ROOT) -> str:
    """What a start costs, built or loaded from an artifact, from benchmarks/results/start_*.json."""
    files = sorted((root / "benchmarks" / "results").glob("start_*.json"))
    return "\n\n".join(start_on(json.loads(path.read_text(encoding="utf-8"))) for path in files)


def start_on(found: dict[str, Any]) -> str:
    """The same, of one kind of ranks."""
    ways = {"cold": "built", "warm": "built, Inductor's cache full", "artifact": "from an artifact"}

    def each(recipe: str, way: str, key: str) -> str:
        return ", ".join(f"{row[key]:.1f}" for row in found["rows"] if (row["recipe"], row["way"]) == (recipe, way))

    rows, whole = [], any("start" in row for row in found["rows"])
    for made in [row for row in found["rows"] if row["way"] == "compile"]:
        recipe = made["recipe"]
        times = [f"{took} s ({each(recipe, way, 'command')} s)" if took else NOT_MEASURED
                 for way in ways for took in [each(recipe, way, "start" if whole else "stages")]]
        rows.append([f"`{recipe}`", *times, f"{made['command']:.0f} s, {made['bytes'] / 1e6:.1f} MB"])
    heads = ["recipe", *ways.values(), "`workbench compile` takes, writes"]
    where = of_gpu(found) if found["machine"]["gpus"] else of_cpu(found)
    span = ("From the start of the run to the end of the first step on the slowest rank, imports left out" if whole else
            "From the author stage to the end of the first step on rank 0")
    return (f"{table(heads, rows)}\n\n{span}, and in brackets "
            f"the whole command, with imports and all steps; each run; {', '.join(found['changes'])}. {where}."
            f"{same_losses(found['rows'])}")


def same_losses(rows: list[dict[str, Any]]) -> str:
    """Whether the runs of each recipe have the same losses, where a result keeps them."""
    by_recipe: dict[str, set[tuple[str, ...]]] = {}
    for row in rows:
        if "losses" in row:
            by_recipe.setdefault(row["recipe"], set()).add(tuple(row["losses"]))
    if not by_recipe:
        return ""
    odd = [f"`{recipe}`" for recipe, losses in by_recipe.items() if len(losses) > 1]
    return f" Losses differ between the runs of {' and '.join(odd)}." if odd else (
        " All runs of a recipe have the same losses, bitwise.")


def depth_table(root: Path = ROOT) -> str:
    """Processor time of capture and partition by depth, from benchmarks/results/depth.json."""
    found = json.loads((root / "benchmarks" / "results" / "depth.json").read_text(encoding="utf-8"))
    rows = []
    for row in found["rows"]:
        seconds = [f"{row[f'{stage}_cpu_seconds']:.1f} s" for stage in ("capture", "partition")]
        rows.append([str(row["layers"]), f"{row['nodes']:,}", *seconds])
    return (table(["layers", "nodes", "capture, CPU time", "partition, CPU time"], rows)
            + f"\n\n{mesh_text(found['mesh'])}; {of_cpu(found)}.")


def of_cpu(found: dict[str, Any]) -> str:
    """The machine, torch and command of a result that a CPU gave."""
    machine, torch = found["machine"], found["versions"]["torch"].split("+")[0]
    return f"{machine['cores']} cores of {machine['cpu']}, torch {torch} (`{found['command']}`)"


def what_if_table(root: Path = ROOT) -> str:
    """Seconds to each what-if's answer, from benchmarks/results/what_if.json."""
    found = json.loads((root / "benchmarks" / "results" / "what_if.json").read_text(encoding="utf-8"))
    rows = [["capture with every layer traced", f"{found['whole_capture_seconds']:.1f} s"],
            ["the first build, whose capture copied alike layers", f"{found['first']['seconds']:.1f} s"]]
    for group, changes in found["changes"].items():
        for each in changes:
            change = each["change"]
            said = change if isinstance(change, str) else ", ".join(
                f"`{key} = {json.dumps(value)}`" for key, value in change.items())
            rows.append([f"{group.replace(': ', ', ')}: {said}", f"{each['seconds']:.1f} s"])
    rows.append(["revert", f"{found['revert_seconds']:.2f} s"])
    return table(["change", "seconds to the answer"], rows) + f"\n\n{of_cpu(found)}."


SOAKED = {"pools": "pools of two ranks, every fifth with a rank that raises or is killed",
          "changes": "`what_if` changes, every tenth refused as well",
          "cells": "`%%ranks` cells, every tenth raises",
          "restarts": "restarts of a kernel with an open pool, four in five after a fault"}


def soak_table(root: Path = ROOT) -> str:
    """What a long session leaves behind, from benchmarks/results/soak.json."""
    found = json.loads((root / "benchmarks" / "results" / "soak.json").read_text(encoding="utf-8"))
    columns = {"memory_mb": "memory, MB", "started_mb": "memory of started processes, MB", "descriptors": "descriptors",
               "threads": "threads", "processes": "started processes", "temporary_files": "temporary files"}
    rows = [[f"{row['runs']:,} {SOAKED[name]}", *(", ".join(
        f"{each[key]:g}" for each in (row["samples"][0], row["samples"][-1], row["closed"])) for key in columns)]
            for name, row in found["rows"].items()]
    grown = "; ".join(f"{name}: {said}" for name, row in found["rows"].items() for said in row["grown"])
    more = {name: sum(row["samples"][-1][key] - row["samples"][0][key] for key in ("memory_mb", "started_mb"))
            / (0.9 * row["runs"]) for name, row in found["rows"].items()}
    each = ", ".join(f"{1e3 * mb:.1f} kB for each of the {name}" for name, mb in more.items())
    return (table(["what", *columns.values()], rows) + f"\n\nGrown: {grown or 'nothing'}. Memory between the first and "
            f"the last sample: {each}, in all processes together.\n\n{of_cpu(found)}.")


CATCHERS = {"lint": "lint", "collectives": "collectives", "ranks": "order of ranks", "numerics": "numerics",
            "running": "a run"}


def mutants_table(root: Path = ROOT) -> str:
    """Planted faults and which verdict caught them, from benchmarks/results/mutants.json."""
    found = json.loads((root / "benchmarks" / "results" / "mutants.json").read_text(encoding="utf-8"))

    def row(what: str, each: dict[str, Any]) -> list[str]:
        caught = sum(each[name] for name in CATCHERS)
        return [what, str(each["planted"]), *(str(each[name] or "") for name in CATCHERS),
                str(each["equivalent"] or ""), str(each["false_pass"] or ""),
                f"{each['rate']:.1%}" if each["rate"] is not None else "", f"{each['named']} of {caught}",
                f"{each['named'] + each['located']} of {caught}"]

    whole, heads = found["whole"], ["fault", "planted", *CATCHERS.values(), "equal", "not caught", "caught",
                                    "sentence names it", "or bisect does"]
    rows = [row("all", whole), *(row(each["about"], each) for each in sorted(
        found["operators"].values(), key=lambda each: each["kind"]))]
    alone = ", ".join(f"{CATCHERS[name]} {count}" for name, count in found["alone"].items())
    equal = table(["why equal", "mutants"], [[why, str(count)] for why, count in sorted(
        found["equivalent"].items(), key=lambda item: -item[1])])
    survivors = table(["not caught", "touches", "why"], [
        [f"`{each['key']}`", ", ".join(f"`{n}`" for n in each["nodes"]), each["why"]]
        for each in found["survivors"]]) if found["survivors"] else ""
    effect, memory = found["told"]["effect"], found["told"]["memory"]
    told = (f"Of the verdicts that were asked, no other one catches these: {alone}. Numerics was asked only where the "
            "others fail nothing.\n\n"
            f"effect fails no mutant: of the {effect['rows']} that it calls NO_EFFECT, another verdict catches "
            f"{effect['caught']}, and {effect['equivalent']} are equal. The estimate of memory is no verdict: of the "
            f"{memory['rows']} whose estimate grows, another verdict catches {memory['caught']}, and "
            f"{memory['equivalent']} are equal. Both stay for what no mutant is: a pass that did nothing, and a pass "
            "that saves less memory than it should.")
    where = f"2 gloo ranks, torch {found['torch'].split('+')[0]}, seed {found['seed']} (`{found['command']}`)."
    return "\n\n".join(filter(None, [table(heads, rows), told, equal, survivors, where]))


def faults_table(root: Path = ROOT) -> str:
    """Seconds from each fault on real ranks to its report, from benchmarks/results/faults_*.json; none left orphans."""
    found = [json.loads(path.read_text(encoding="utf-8"))
             for path in sorted((root / "benchmarks" / "results").glob("faults_*.json"))]
    rows = [row for data in found for row in data["faults"]]
    kinds = list(dict.fromkeys(row["ranks"] for row in rows))
    said = {(row["fault"], row["ranks"]): f"{row['seconds to report']} s" for row in rows
            if row["orphans"] == 0 and row["next call works"] == "yes"}
    places = [f"{data['gpus'][0] if data['gpus'] else str(data['cores']) + ' CPU cores'}, torch "
              f"{data['torch'].split('+')[0]}" for data in found]
    return table(["what happens", *kinds], [[fault, *(said.get((fault, kind), "") for kind in kinds)]
                 for fault in dict.fromkeys(row["fault"] for row in rows)]) + f"\n\n{'; '.join(places)}."


def views_table(root: Path = ROOT) -> str:
    """First paint of each view, from benchmarks/results/views.json."""
    found = json.loads((root / "benchmarks" / "results" / "views.json").read_text(encoding="utf-8"))
    names = {"graph": "graph", "large": "graph, several times over", "timeline": "timeline", "memory": "memory",
             "passes": "stepper over the passes"}
    rows = [[names[row["view"]], f"{row['nodes']:,}", f"{row['first_paint_s']:.2f} s"] for row in found["rows"]]
    rows.append(["a step to another pass, median", f"{found['rows'][-1]['nodes']:,}",
                 f"{found['median_step_ms'] / 1e3:.2f} s"])
    machine = found["machine"]
    return (table(["view", "nodes", "from the call to the first paint"], rows)
            + f"\n\n{machine['cores']} cores of {machine['cpu']} (`{found['command']}`).")


def timelines_table(root: Path = ROOT) -> str:
    """The cost model beside GPUs, from benchmarks/results/timeline_*.json."""
    rows, places = [], []
    for path in sorted((root / "benchmarks" / "results").glob("timeline_*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows.append([f"`{found['recipe']['name']}`, 1b, {axes_of(found['recipe'])}",
                     *(f"{found[kind][key]:.1f} ms" for key in ("compute_ms", "exposed_ms")
                       for kind in ("simulated", "measured")),
                     f"{found['matched']} of {found['collectives']}", f"{found['median_absolute_error']:.0%}"])
        gpus = found["machine"]["gpus"]
        places.append(f"{len(gpus)} {gpus[0]}, torch {found['versions']['torch'].split('+')[0]}")
    heads = ["step", "compute, simulated", "measured", "exposed, simulated", "measured", "collectives matched",
             "median error of one"]
    return table(heads, rows) + f"\n\n{'; '.join(dict.fromkeys(places))}."


def accuracy_table(root: Path = ROOT) -> str:
    """Simulated compute beside a GPU's, from benchmarks/results/accuracy_h200x1.json."""
    results = root / "benchmarks" / "results"
    found, other = (json.loads((results / f"accuracy_{device}.json").read_text(encoding="utf-8"))
                    for device in ("h200x1", "h200x2"))
    rows = [[*what_and_sizes(row), f"{row['kernels_ms']:.1f} ms", f"{row['simulated_ms']:.1f} ms",
             f"{row['error']:+.0%}"] for row in found["rows"]]
    gpus = found["machine"]["gpus"]
    worst = max(abs(row["error"]) for row in found["rows"])
    pairs, wrong = found["ranking"]["pairs"], len(found["ranking"]["wrong"])
    return table(["step", "sizes", "measured", "simulated", "error"], rows) + (
        f"\n\nMedian error {found['median_absolute_error']:.0%}, worst {worst:.0%}. Of {pairs} pairs of lists of equal "
        f"sizes that differ by more than 5%, the simulation ranks {pairs - wrong} right. {len(gpus)} {gpus[0]}, torch "
        f"{found['versions']['torch'].split('+')[0]}; simulated as `{found['device']}`. Simulated as "
        f"`{other['device']}`, the same steps have a median error of {other['median_absolute_error']:.1%}.")


def what_and_sizes(row: dict[str, Any]) -> tuple[str, str]:
    """What ran, and the sizes that differ from its recipe's."""
    changes = {key: value for key, value in row["changes"].items() if key.split(".")[0] in ("model", "data")}
    compiled = "full_inductor" in row["recipe"] and row["changes"].get("passes") != "[]"
    what = "dense" if row["recipe"].startswith("llama3") else "experts"
    more = ", checkpointing" if "checkpointing" in row["recipe"] else ""
    return (f"{what}{more}, {'full Inductor' if compiled else 'no compiler'}",
            ", ".join(f"{key.split('.')[1]} {value}" for key, value in changes.items()))


def accuracy_launches_table(root: Path = ROOT) -> str:
    """Steps that their launches bound, from benchmarks/results/accuracy_launches_h200x1.json."""
    path = root / "benchmarks" / "results" / "accuracy_launches_h200x1.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [[*what_and_sizes(row), f"{row['kernels_ms']:.1f} ms", f"{row['step_ms']:.1f} ms",
             f"{row['simulated_step_ms']:.1f} ms", f"{row['simulated_step_ms'] / row['step_ms'] - 1:+.0%}"]
            for row in found["rows"]]
    gpus = found["machine"]["gpus"]
    return table(["step", "sizes", "kernels", "step, measured", "simulated with launches", "error"], rows) + (
        f"\n\n{len(gpus)} {gpus[0]}, torch {found['versions']['torch'].split('+')[0]}; simulated as "
        f"`{found['device']}`.")


def accuracy_exposed_table(root: Path, device: str) -> str:
    """Simulated exposure and steps beside those on two GPUs, from benchmarks/results/accuracy_exposed_*.json."""
    path = root / "benchmarks" / "results" / f"accuracy_exposed_{device}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [[list_of(row), sizes_of(row), ", ".join(f"{ms:.1f}" for ms in row["measured_ms"]) + " ms",
             f"{row['simulated_ms']:.1f} ms", f"{row['step_ms']:.1f} ms" + " with the optimizer" * row["optimizer"],
             f"{row['simulated_step_ms']:.1f} ms"] for row in found["rows"]]
    gpus, pairs = found["machine"]["gpus"], found["ranking"]["pairs"]
    near = sum(abs(row["error"]) < 0.2 or abs(row["simulated_ms"] - min(row["measured_ms"])) < 1
               for row in found["rows"])
    left = "".join(f"\n- {list_of(row)}: {row['why']}" for row in found["left_out"])
    heads = ["mesh, passes", "model", "exposed, measured, each run", "simulated", "step, measured", "simulated"]
    steps = found.get("median_absolute_step_error")
    return table(heads, rows) + (
        f"\n\nMedian error of the exposure {found['median_absolute_error']:.0%}, against the run that exposed least; "
        f"{near} of {len(rows)} are within 20% or 1 ms. " + (f"Median error of the step {steps:.0%}. " if steps else "")
        + f"Of {pairs} pairs of lists on one mesh whose steps differ by more than 5%, the simulation ranks "
        f"{pairs - len(found['ranking']['wrong'])} right. {len(gpus)} {gpus[0]}, torch "
        f"{found['versions']['torch'].split('+')[0]}; simulated as `{found['device']}`."
        + (f"\n\nMeasured, and not simulated:\n{left}" if left else ""))


def experts_step_table(root: Path = ROOT) -> str:
    """A step of small experts, traced and simulated: where the simulation is too short."""
    results = root / "benchmarks" / "results"
    name = "deepseek_v3_capacity_full_inductor_cudagraph"
    traced = read_order([results / "traces_h100x2_experts" / f"{name}.rank0.json.gz"]).steps[-1]
    found = json.loads((results / "accuracy_exposed_h100x2.json").read_text(encoding="utf-8"))["rows"]
    row = next(row for row in found if row["recipe"] == name and row["changes"]["data.batch_per_rank"] == 4)
    total, exposed = row["simulated_step_ms"], row["simulated_ms"]
    return table(["the step", "compute", "exposed", "idle", "all"], [
        ["traced", f"{traced.compute_ms:.1f} ms", f"{traced.exposed_ms:.1f} ms", f"{traced.idle_ms:.1f} ms",
         f"{traced.span_ms:.1f} ms"],
        ["simulated", f"{total - exposed:.1f} ms", f"{exposed:.1f} ms", "none", f"{total:.1f} ms"]]) + (
        f"\n\n{sizes_of(row)}; {list_of(row)}. The traced step is another run than the row above.")


def sizes_of(row: dict[str, Any]) -> str:
    """The model of a row, its layers, and a rank's batch and sequence."""
    sizes = row["changes"]
    experts = "experts, " * row["recipe"].startswith("deepseek_v3")
    return (f"{experts}{sizes['model.flavor']}, {sizes['model.n_layers']} layers, {sizes['data.batch_per_rank']} x "
            f"{sizes['data.seq_len']:,} tokens")


def list_of(row: dict[str, Any]) -> str:
    """The mesh of a row, its passes, and by which device's costs they order; a whole step has the optimizer inside."""
    whole = "whole step: " if row["changes"]["step"] == "whole" else ""
    passes = [f"`{name}`" + f" for {row['ordered_for']}" * (name == "overlap_collectives") for name in row["passes"]]
    return f"{mesh_text(row['axes'])}: {whole}{', '.join(passes) or 'no passes'}"


def one_gpu_table(root: Path = ROOT) -> str:
    """A step on one GPU, peers and ours, from the traces in benchmarks/results/traces_h200."""
    folder = root / "benchmarks" / "results" / "traces_h200"
    said = PEERS | {"llama3_full_inductor": "ours: full Inductor",
                    "llama3_full_inductor_cudagraph": "ours: full Inductor and cudagraph"}
    lines = json_lines(folder / "steps.jsonl")
    rows = []
    for line in lines:
        traced = read_order([folder / f"{line['variant']}.rank0.json.gz"]).steps[-1]
        rows.append([said[line["variant"]], f"{line['step_ms']:.1f} ms", f"{traced.span_ms:.1f} ms",
                     f"{traced.compute_ms:.1f} ms", f"{traced.idle_ms:.1f} ms", f"{traced.launches:,}",
                     f"{line['peak_gib']:.1f} GiB"])
    return table(["what", "step, median", "traced step", "of it compute", "idle", "launches", "peak"],
                 rows) + f"\n\n{of_gpu(lines[0])}."


def whole_step_table(root: Path = ROOT) -> str:
    """The optimizer inside the graph and outside, from benchmarks/results/whole_step_h200x1.jsonl."""
    path = root / "benchmarks" / "results" / "whole_step_h200x1.jsonl"
    found = json_lines(path)
    rows = [["in the graph" if row["step"] == "whole" else "outside", ", ".join(f"`{name}`" for name in row["passes"]),
             f"{row['step_ms']:.1f} ms", str(row["launches"]), f"{row['peak_bytes'] / 2**30:.1f} GiB"] for row in found]
    heads = ["clipping and AdamW", "lowered by", "a step", "launches of its graphs", "peak"]
    return f"{table(heads, rows)}\n\n{of_gpu(found[-1])}, and each row with its own step and passes."


UPDATE = {"norm": "LpNorm", "scaling": "BinaryOpScalar", "AdamW": "FusedAdam"}
"""The kernels of clipping and of the optimizer, by their names."""


def update_cost(root: Path, variant: str) -> dict[str, float]:
    """What clipping, AdamW and idle time take of a traced step on two GPUs, in ms; of both ranks the most."""
    paths = [root / "benchmarks" / "results" / "traces_h200x2" / f"{variant}.rank{rank}.json.gz" for rank in (0, 1)]
    steps = [(read_trace(path).steps[-1].events, read_order([path]).steps[-1]) for path in paths]
    found = {name: max(sum(e.end - e.begin for e in events if kernel in e.name) for events, _ in steps) / 1e3
             for name, kernel in UPDATE.items()}
    return found | {"idle": max(step.idle_ms for _, step in steps), "step": max(step.span_ms for _, step in steps)}


def update_cost_table(root: Path = ROOT) -> str:
    """How much of a step the whole step in one graph can save at most, from benchmarks/results/traces_h200x2."""
    variants = {"outside": "llama3_full_inductor_block_bucketing_overlap_cudagraph",
                "in the graph": "llama3_whole_step_fused_cudagraph"}
    costs = {where: update_cost(root, variant) for where, variant in variants.items()}
    pair = costs["outside"]
    heads = ["clipping and AdamW", *pair]
    rows = [[where, *(f"{ms:.2f} ms" for ms in found.values())] for where, found in costs.items()]
    return (f"{table(heads, rows)}\n\nWithout norm, scaling and any idle time, the step of a pair would be "
            f"{pair['norm'] + pair['scaling'] + pair['idle']:.1f} ms shorter. If AdamW took no time either: "
            f"{sum(pair.values()) - pair['step']:.1f} ms. The norm is {pair['norm'] / pair['step']:.1%} of the step.")


def captures_table(root: Path = ROOT) -> str:
    """Which recipes run from both captures, and in what they differ, from benchmarks/results/captures.json."""
    found = json.loads((root / "benchmarks" / "results" / "captures.json").read_text(encoding="utf-8"))

    def said(row: dict[str, Any], name: str) -> str:
        return f"refused: {row['refused'][name]}" if name in row["refused"] else row["verdicts"][name]

    def differences(row: dict[str, Any]) -> str:
        """How many nodes differ, by kind, but for meshes among the inputs."""
        nodes: dict[str, int] = {}
        for kind, *_, count in row.get("differences", []):
            nodes[kind] = nodes.get(kind, 0) + count
        told = [f"{kind} {count}" for kind, count in nodes.items() if kind != "inputs"]
        return ", ".join(told) or ("none" if row.get("aligned") else "")

    rows = [[f"`{row['recipe']}`", axes_of({"mesh": row["mesh"]}), *(said(row, name) for name in ("joint", "traced")),
             f"{row['aligned']:,}" if row.get("aligned") else "", differences(row),
             row["values"][1] if "values" in row else ""] for row in found["recipes"]]
    heads = ["recipe", "mesh", "joint", "traced", "operators in both", "nodes that differ", "values"]
    on_gpus = [captures_on_gpus(path) for path in sorted((root / "benchmarks" / "results").glob("captures_*.json"))]
    return "\n\n".join([f"{table(heads, rows)}\n\n{of_cpu(found)}.", *on_gpus])


def captures_on_gpus(path: Path) -> str:
    """Both captures on GPUs: the time of a step, and whether they train the same."""
    found = json.loads(path.read_text(encoding="utf-8"))

    def step(row: dict[str, Any], name: str) -> str:
        timed = f"{row['step_ms'][name]:.1f} ms" if "step_ms" in row else "not timed"
        return "not done" if "problem" in row else row["refused"].get(name, timed)

    rows = [[f"`{row['recipe']}`", row["flavor"], axes_of({"mesh": row["mesh"]}),
             *(", ".join(filter(None, (row.get("verdicts", {}).get(name), step(row, name)))) for name in (
                 "joint", "traced")), row.get("values", ["", row.get("problem", "")])[1]] for row in found["recipes"]]
    heads = ["recipe", "model", "mesh", "joint", "traced", "values"]
    return f"{table(heads, rows)}\n\n{of_gpu(found)}."


def float8_table(root: Path = ROOT) -> str:
    """Matrix products of llama3 in bfloat16 and float8, from benchmarks/results/float8_products_h200.json."""
    found = json.loads((root / "benchmarks" / "results" / "float8_products_h200.json").read_text(encoding="utf-8"))
    rows = []
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        own = [row for row in found["rows"] if row["model"] == model]
        for kind in (*dict.fromkeys(row["layers"] for row in own), "all"):
            some = [row for row in own if kind in ("all", row["layers"])]
            shown = [f"{sum(r['count'] * r['bfloat16_ms'] for r in some):.1f} ms"]
            for scaling in ("tensorwise", "rowwise"):
                products = sum(r["count"] * r[f"{scaling}_fast_ms"] for r in some)
                casts = sum(r["count"] * sum(r[f"{scaling}_cast_ms"]) for r in some)
                shown.append(f"{products:.1f} + {casts:.1f} ms")
            rows.append([model, "all" if kind == "all" else f"{some[0]['count']} x {kind}", *shown])
    return table(["model", "layers", "bfloat16", "tensorwise: products + casts", "rowwise: products + casts"],
                 rows) + f"\n\n{found['tokens']:,} tokens. {of_gpu(found)}."


def float8_grouped_table(root: Path = ROOT) -> str:
    """Products of deepseek_v3's experts in bfloat16 and float8, as benchmarks/float8_grouped_products.py found them."""
    path = root / "benchmarks" / "results" / "float8_grouped_products_h200.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for row in found["rows"]:
        ways = [f"{row[f'{way}_fast_ms']:.2f} + {sum(row['cast_ms']):.2f} ms" if f"{way}_fast_ms" in row else
                f"fails: {row[f'{way}_problem'].splitlines()[0][:60]}" if f"{way}_problem" in row else ""
                for way in ("grouped", "one_by_one")]
        plain = f"{row['bfloat16_ms']:.2f} ms" if "bfloat16_ms" in row else f"fails: {row['problem'][:60]}"
        rows.append([row["model"], row["dispatch"], row["layers"], row["product"],
                     f"{row['groups']} x [{row['rows']:,}, {row['k']:,}, {row['n']:,}]", plain, *ways])
    odd = "; ".join(f"{row['product']}: {row['problem'][:80]}" if "problem" in row else
                    f"{row['product']}: {row['error']:.1%} off" for row in found["unaligned"])
    heads = ["model", "experts", "layers", "product", "rows, k, n", "bfloat16", "grouped: product + casts",
             "one by one: products + casts"]
    return (f"{table(heads, rows)}\n\nCounts of rows that are no multiple of 16: {odd or 'not measured'}. "
            f"{of_gpu(found)}.")


KERNELS = {
    "float8 products": "nvjet_sm90_q", "bfloat16 products": "nvjet|gemm", "attention": "sdpa|cudnn",
    "optimizer, clipping": "multi_tensor_apply", "Inductor's": "^triton", "torch's others": "at::native",
}


def float8_kernels_table(root: Path = ROOT) -> str:
    """Where the kernels' time of a float8 step goes, as far as its 20 longest kernels tell."""
    rows = []
    for flavor, name, variants in (
        ("1b", "float8_h200x2.jsonl", ("llama3_whole_step_fused_cudagraph", "llama3_float8_cudagraph")),
        ("8b", "float8_8b_h200x2.jsonl", ("llama3_whole_step_fused_cudagraph", "llama3_float8_whole_step_cudagraph",
                                          "compile_float8_tensorwise")),
    ):
        first = {line["variant"]: line for line in reversed(list(json_lines(root / "benchmarks" / "results" / name)))}
        for variant in variants:
            spent = dict.fromkeys(KERNELS, 0.0)
            for kernel, ms in first[variant]["longest"].items():
                if "nccl" not in kernel:
                    spent[family(kernel, KERNELS)] += ms
            total = first[variant]["kernels_ms"]
            rows.append([flavor, choice_of(first[variant]), f"{total:.1f} ms", *(f"{ms:.1f}" for ms in spent.values()),
                         f"{total - sum(spent.values()):.1f}"])
    return table(["model", "choice", "kernels", *KERNELS, "shorter ones"], rows)


def float8_numerics_found(root: Path = ROOT) -> dict[str, Any]:
    """What benchmarks/float8_numerics.py found."""
    path = root / "benchmarks" / "results" / "float8_numerics_gloo.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def float8_numerics_table(root: Path = ROOT) -> str:
    """Distance of each gradient to float64's, and what the losses do, by the types of the products."""
    found = float8_numerics_found(root)
    variants = list(found["gradients"])
    rows = [[f"gradient of `{name}`", *(f"{found['gradients'][v][name]:.1%}" for v in variants)]
            for name in found["gradients"][variants[0]]]
    losses = found["losses"]
    count = len(losses[variants[0]])
    last = {v: sum(losses[v][-20:]) / 20 for v in variants}
    rows.append(["mean loss of the last 20 steps", *(f"{last[v]:.3f}" for v in variants)])
    rows.append([f"largest gap to bfloat16's loss in {count} steps", "", *(
        f"{max(abs(a - b) for a, b in zip(losses[v], losses[variants[0]], strict=True)):.3f}" for v in variants[1:])])
    return f"{table(['', *variants], rows)}\n\n{of_cpu(found)}."


def peaks_table(root: Path = ROOT) -> str:
    """The predicted peak of a step beside the recorded one, from benchmarks/results/peaks.json; the closest first."""
    found = json.loads((root / "benchmarks" / "results" / "peaks.json").read_text(encoding="utf-8"))

    def line(row: dict[str, Any]) -> list[str]:
        said = row.get("problem") or f"{row['predicted_gib']:.2f} GiB, in the {row['phase']}"
        return [f"`{row['variant']}`", axes_of({"mesh": row["mesh"]}), f"{row['recorded_gib']:.2f} GiB", said,
                f"{row['off']:+.1%}" if "off" in row else ""]

    parts = []
    for covered, head in ((True, "recorded"), (False, "recorded, of replays alone")):
        rows = sorted((row for row in found["rows"] if row["recording"] == covered),
                      key=lambda row: abs(row.get("off", 1.0)))
        parts.append(table(["step", "mesh", head, "predicted", "off"], [line(row) for row in rows]))
    return "\n\n".join([*parts, f"Predicted without a GPU: {of_cpu(found)}."])


def of_gpu(found: dict[str, Any]) -> str:
    """Where it was measured: GPUs, torch and command."""
    gpus = found["machine"]["gpus"]
    return f"{len(gpus)} {gpus[0]}, torch {found['versions']['torch'].split('+')[0]} (`{found['command']}`)"


def places(text: str) -> list[str]:
    """The names of the tables that a document shows, in order."""
    return re.findall(r"<!-- (\w+):begin -->", text)


def with_tables(text: str, made: dict[str, str], name: str) -> str:
    """The text of the document `name` with what stands between each pair of markers replaced."""
    for place in places(text):
        begin, end = f"<!-- {place}:begin -->", f"<!-- {place}:end -->"
        before, _, rest = text.partition(begin)
        _, marker, after = rest.partition(end)
        if not marker:
            raise SystemExit(f"{name}: no {end} after {begin}")
        if place not in made:
            raise SystemExit(f"{name}: {begin}: no such table: one of {', '.join(sorted(made))}")
        text = f"{before}{begin}\n{made[place]}\n{end}{after}"
    return text


def picture() -> str:
    """The pipeline as SVG: two rows of boxes; an arrow is a public function."""
    wide, high, gap, per_row = 150, 44, 86, 4
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 250" font-family="sans-serif" font-size="13" '
           'role="img" aria-label="The pipeline, from a recipe to a report">',
           '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
           '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
           '<rect width="960" height="250" fill="#fff"/>']
    for i, (noun, verb) in enumerate(STEPS):
        column, row = i % per_row, i // per_row
        x, y = 20 + column * (wide + gap), 40 + row * 110
        middle = y + high / 2
        out.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="6" fill="#f4f6f8" stroke="#555"/>')
        out.append(f'<text x="{x + wide / 2:g}" y="{middle + 5:g}" text-anchor="middle">{noun}</text>')
        if not verb:
            continue
        color = "#0b5fa5" if verb in PASSES else "#333"
        label = f'font-size="11" fill="{color}" text-anchor="middle"'
        if column < per_row - 1:
            out.append(f'<path d="M{x + wide} {middle:g}h{gap - 2}" stroke="{color}" marker-end="url(#tip)"/>')
            out.append(f'<text x="{x + wide + gap / 2:g}" y="{middle - 8:g}" {label}>{verb}</text>')
        else:
            turn = y + high + 33
            out.append(f'<path d="M{x + wide / 2:g} {y + high}V{turn}H{20 + wide / 2:g}V{y + 108}" fill="none" '
                       f'stroke="{color}" marker-end="url(#tip)"/>')
            out.append(f'<text x="480" y="{turn - 8}" {label}>{verb}</text>')
    out.append('<text x="20" y="228" fill="#0b5fa5">Blue: passes, one by one. After each: '
               'lint, effect, collectives; on real ranks also numerics.</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def documents() -> dict[str, str]:
    """Each document's text with its tables as the data are now."""
    made = tables()
    return {name: with_tables((ROOT / name).read_text(encoding="utf-8"), made, name) for name in DOCUMENTS}


def main() -> None:
    for name, text in documents().items():
        (ROOT / name).write_text(text, encoding="utf-8")
    (ROOT / "docs" / "pipeline.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
