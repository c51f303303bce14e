"""Write what the README shows of the code: the tables between its markers, and docs/pipeline.svg.

    python docs/make_tables.py

Tables come from lessons, lessons/recipes, the passes' contracts and the reports in benchmarks/results, which
`workbench run RECIPE --json FILE` writes. No torch here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from workbench.notebook.lessons.lesson import load_lesson  # noqa: E402
from workbench.recipe.contracts import CONTRACTS, Numerics, PassContract  # noqa: E402
from workbench.recipe.recipe import Recipe, load_recipe  # noqa: E402
from workbench.recipe.rules import cuda_reasons  # noqa: E402

NOT_MEASURED = "not measured yet"
STEP = "1b model, 4 H200, a step"
USUAL = "dp_shard 2 x tp 2"  # of that column
PEERS = {
    "eager": "torch: eager FSDP2 + TP", "compile": "torch: FSDP2 + TP, each block by `torch.compile`",
    "reference": "torchtitan 0.2.2 compiler toolkit, no passes",
    "reference_block_bucketing": "the same, block bucketing",
    "reference_full_inductor": "the same, full Inductor",
    "reference_flex_block_bucketing_regional": "the same, FlexAttention, block bucketing and regional Inductor",
    "reference_cudagraph": "the same, cudagraph",
    "reference_block_bucketing_cudagraph": "the same, block bucketing and cudagraph",
}
STEPS = (  # what goes in, and the public function that takes it on
    ("Recipe", "author"), ("model on a World", "capture"), ("JointGraph", "run_joint"), ("JointGraph", "partition"),
    ("ForwardBackward", "run_partitioned"), ("ForwardBackward", "compile_step"), ("CompiledStep", "train"),
    ("Report", ""),
)
PASSES = ("run_joint", "run_partitioned")


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
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
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
    mesh = " x ".join(f"{axis} {size}" for axis, size in recipe.mesh.axes.items()) or "one rank"
    passes = ", ".join(f"`{name}`" for name in recipe.pass_names) or "none"
    own = [run for run in runs if run["recipe"]["name"] == recipe.name]
    return [f"`{recipe.name}`", mesh, passes, needs_cuda(recipe) or cell(own, "gloo"), cell(own, "nccl"),
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
    return {"table": recipe_tables(root), "ranks": ranks_table(root), "faults": faults_table(root),
            "views": views_table(root), "timelines": timelines_table(root), "experts": experts_table(root),
            "exposed": exposed_table(root), "lessons": lessons_table(root)}


def lessons_table(root: Path = ROOT) -> str:
    """The lessons, and the exhibits of the bug museum in them."""
    lessons = [load_lesson(path) for path in sorted((root / "lessons").glob("[0-9]*.toml"))]
    rows = [[f"[{each.name[:2]} {each.title}](notebooks/{each.name}.ipynb)", each.question, f"{each.minutes} min"]
            for each in lessons]
    museum = [[exhibit.bug, exhibit.seen, each.name[:2]] for each in lessons for exhibit in each.museum]
    return "\n\n".join((table(["lesson", "question", "time"], rows),
                        "The bug museum, each as the smallest graph that shows it:",
                        table(["what went wrong", "where it was seen", "lesson"], museum)))


def recipe_tables(root: Path = ROOT) -> str:
    """Recipes, passes, and what torch itself takes for the same step."""
    runs = reports(root / "benchmarks" / "results")
    names = sorted(path.stem for path in (root / "lessons" / "recipes").glob("*.toml"))
    recipes = [load_recipe(root / "lessons" / "recipes" / f"{name}.toml") for name in names]
    where, steps = ["CPU, gloo", "GPU, nccl"], step_times(root / "benchmarks" / "results" / "llama3_1b_h200x4.jsonl")
    peers = [[said, steps.get(name, NOT_MEASURED)] for name, said in PEERS.items()]
    return "\n\n".join((
        table(["recipe", "mesh", "passes", *where, STEP], [recipe_row(recipe, runs, steps) for recipe in recipes]),
        table(["pass", "stage", "numerics", "needs", *where],
              [pass_row(contract, runs) for contract in CONTRACTS.values() if contract.source != "user"]),
        table(["others, from the same initial values", STEP], peers),
    ))


def experts_table(root: Path = ROOT) -> str:
    """DeepSeek v3 beside its peers, from benchmarks/results/deepseek_v3_*.jsonl: each run of a variant in order."""
    parts = []
    for path in sorted((root / "benchmarks" / "results").glob("deepseek_v3_*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
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


def exposed_table(root: Path = ROOT) -> str:
    """What of NCCL nothing hides in a replayed step: the lines of rounds in llama3_1b_h200x2.jsonl."""
    path = root / "benchmarks" / "results" / "llama3_1b_h200x2.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        if "round" in line:
            name = PEERS.get(line["variant"], f"`{line['variant']}`").replace("the same", "torchtitan 0.2.2")
            passes = json.loads(line["changes"].get("passes", "[]"))
            said = ", ".join((name, *(f"`{each}`" for each in passes)))
            runs.setdefault((axes_of(line["recipe"]), said), []).append(line)
    rows = [[axes, said, *(", ".join(f"{run[key]:.1f} ms" for run in found)
                           for key in ("step_ms", "nccl_ms", "exposed_nccl_ms")), f"{found[-1]['peak_gib']:.1f} GiB"]
            for (axes, said), found in sorted(runs.items(), key=lambda item: item[0][0])]
    gpus, torch = lines[0]["machine"]["gpus"], lines[0]["versions"]["torch"].split("+")[0]
    return (table(["mesh", "variant", "a step, each run", "NCCL", "of it exposed", "peak"], rows)
            + f"\n\n{len(gpus)} {gpus[0]}, torch {torch}.")


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
    first = max(row["highest"] for row in found["rows"] if (row["way"], row["what"]) == columns[0])
    return (f"{table(['gloo ranks', *heads], rows)}\n\n{said}; medians of {found['repeats']} (`{found['command']}`). "
            f"The first pool, for which torch was imported, took {first * 1e3:,.0f} ms; the others fork what did so.")


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


def with_tables(text: str, made: dict[str, str]) -> str:
    """`text` with what stands between each pair of markers replaced."""
    for name, new in made.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        _, marker, after = rest.partition(end)
        if not marker:
            raise SystemExit(f"README.md: no {begin} and {end}")
        text = f"{before}{begin}\n{new}\n{end}{after}"
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
               'lint, effect, collectives, memory; on real ranks also numerics and time.</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    (ROOT / "docs" / "pipeline.svg").write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
