"""The launches of a step, before and after Inductor: counts by kind, and strips of one character a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.checks.record import PassRecord
from workbench.graph.callables import kernels_of
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.graph.read.nodes import kind_of
from workbench.lab.inside_inductor import look_inside
from workbench.lab.what_if.study import Study, what_if
from workbench.notebook.draw.picture import Picture
from workbench.pipeline.run import run
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.world.fake import fake_world
from workbench_lessons.course.lesson import Lesson
from workbench_lessons.course.recorded_figures import Figures, on_gpus
from workbench_lessons.l05_bucket_and_overlap.stacked import stacked

SIGNS = {"matmul": "M", "attention": "M", "collective": ">", "wait": "<", "view": "", "bookkeeping": ""}
"""Of a node, by kind; any other is a dot."""
KINDS = {"M": "matmuls and attention", ">": "collectives", ".": "other operators, or generated kernels",
         "+": "fills of buckets"}
VARIANTS = {"no pass": "llama3", "regions": "llama3_regional", "everything": "llama3_full_inductor"}


def compiled(recipe: Recipe, *passes: Any) -> Study:
    """The recipe with these passes on a fake rank: its graphs, and the record of each pass."""
    with fake_world(recipe.mesh.world_size) as world:
        return what_if(recipe.override({"passes": list(passes)}), world, progress=False)


def kernels(record: PassRecord) -> tuple[Kernels, ...]:
    """Inductor's calls, of the forward and of the backward."""
    return kernels_of(record.before, record.after)


def one_kernel(answer: Callable[..., torch.Tensor], config: dict[str, Any]) -> dict[str, int]:
    """Of the first checkpoint: the answer's calls, and whether it differs from relu((x * s) @ w)."""
    shapes = (8, 32), (32, 32), (8, 1)
    generator = torch.Generator().manual_seed(0)
    x, w, s = (torch.randn(shape, generator=generator) for shape in shapes)  # s of both signs
    kinds = look_inside(answer, x, w, s, config=config).kernels.kinds
    same = torch.allclose(answer(x, w, s), torch.relu((x * s) @ w), atol=1e-4)
    return {"generated kernels": kinds.get("cpp", 0), "library calls": kinds.get("extern", 0),
            "other results": int(not same)}


def strip(graph: GraphModule) -> str:
    """A character for each node that computes or communicates; views are left out."""
    return "".join(SIGNS.get(kind_of(n), ".") for n in graph.graph.nodes if n.op == "call_function")


def numbered(graph: GraphModule, calls: Kernels) -> str:
    """As `strip`, but an operator that a generated kernel computes is the number of the first such kernel."""
    generated = [k for k in calls.kernels if k.kind not in ("extern", "collective", "wait")]
    numbers: dict[str, str] = {}
    for number, kernel in enumerate(generated, 1):
        numbers = dict.fromkeys(kernel.nodes, str(number)) | numbers
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    return "".join(SIGNS.get(kind_of(n), numbers.get(n.name, ".")) for n in nodes)


def strips(record: PassRecord) -> list[str]:
    """A character for each of Inductor's calls: a letter starts a collective, and its small letter waits.

    `M` is a matmul or attention, `+` another library call, which fills a bucket, and a dot is a generated kernel.
    """
    return [_letters(part, graph) for part, graph in zip(kernels(record), record.before, strict=True)]


def _letters(calls: Kernels, graph: GraphModule) -> str:
    nodes = {n.name: n for n in graph.graph.nodes}
    known: dict[str, str] = {}
    text = ""
    for call in calls.kernels:
        if call.kind == "collective":
            letter = chr(ord("A") + len({*known.values()}))
            known |= dict.fromkeys(call.nodes, letter)
            text += letter
        elif call.kind == "wait":
            text += known.get(nodes[call.nodes[0]].args[0].name, "?").lower()  # type: ignore[union-attr]
        else:
            text += _sign(call, nodes)
    return text


def _sign(call: Kernel, nodes: Mapping[str, Node]) -> str:
    if call.kind != "extern":
        return {"collective": ">", "wait": "<"}.get(call.kind, ".")
    return "M" if {kind_of(nodes[name]) for name in call.nodes} & {"matmul", "attention"} else "+"


def bare(record: PassRecord) -> list[str]:
    """The collectives of each graph that no call can hide: none is between start and wait."""
    return ["".join(_bare(text)) for text in strips(record)]


def _bare(text: str) -> Iterator[str]:
    for letter in text:
        between = text[text.find(letter) : text.find(letter.lower())]
        if letter != "M" and letter.isupper() and not {".", "M", "+"} & {*between}:
            yield letter


def counts(record: PassRecord) -> dict[str, int]:
    """What the last checkpoint bounds."""
    launches = sum(part.launches for part in kernels(record))
    return {"launches": launches, "bare collectives": len("".join(bare(record)))}


def bars(steps: dict[str, PassRecord | Sequence[GraphModule]]) -> Picture:
    """The launches of each step by kind: of a record, those that Inductor made; of graphs, a launch for each node."""
    counts = {name: Counter(_of_record(step) if isinstance(step, PassRecord) else chain.from_iterable(map(strip, step)))
              for name, step in steps.items()}
    shown = {sign: title for sign, title in KINDS.items() if any(kinds[sign] for kinds in counts.values())}
    rows = {f"{name}: {sum(kinds[sign] for sign in shown)}": {title: kinds[sign] for sign, title in shown.items()}
            for name, kinds in counts.items()}
    return stacked(rows, "launches of one step, with one layer, on a CPU")


def _of_record(record: PassRecord) -> Iterator[str]:
    for part, graph in zip(kernels(record), record.before, strict=True):
        nodes = {n.name: n for n in graph.graph.nodes}
        yield from (_sign(call, nodes) for call in part.kernels)


def on_two_gpus(lesson: Lesson) -> Figures:
    """Launches and the step of a llama3 of two layers, by what is compiled."""
    figures = on_gpus(lesson, "kernels, launches and step time",
                      lambda: [_row(title, load_recipe(name)) for title, name in VARIANTS.items()], gpus=2)
    shown = ("compiled", "launches", "step, ms", "numerics")
    rows = tuple({key: row[key] for key in shown} for row in figures.rows)
    return replace(figures, name="launches and step time", rows=rows)


def _row(title: str, recipe: Recipe) -> dict[str, Any]:
    passes = [name for name in recipe.pass_names if name.endswith(("inductor", "compilation"))]
    two_gpus = {"mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 2, "passes": passes}
    report = run(recipe.override(two_gpus), world="nccl", level="full", progress=False)
    assert report.profile is not None and report.step_seconds is not None
    numerics = next(verdict for verdict in report.pipeline if verdict.check == "numerics")
    return {"compiled": title, "kernels": report.profile.kernels, "launches": report.profile.launches,
            "step, ms": round(1e3 * report.step_seconds, 1), "numerics": str(numerics.outcome)}
