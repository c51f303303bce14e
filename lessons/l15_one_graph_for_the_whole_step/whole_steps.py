"""What "One graph for the whole step" prints, counts and asks: a graph's lines, traffic, recorded steps, late reads."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.authoring.author import author
from workbench.checks.lint import stale_reads
from workbench.graph.read.nodes import lists_of_update, updates_of
from workbench.graph.read.program import program
from workbench.lab.traces.trace_file import TracedStep
from workbench.lab.whole_step.join import StepGraph
from workbench.notebook.draw.picture import Table, table
from workbench.pipeline.gpu_communication import union
from workbench.recipe.recipe import load_recipe
from workbench.tools.compatibility import results_dir
from workbench.torch_api.ops import tensor_bytes
from workbench.world.fake import fake_world
from workbench_lessons.course.grading import by_cases, by_slips
from workbench_lessons.course.recorded_figures import json_lines
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import Pace

VARIANTS = {"compile_keep_loss": "outside: FSDP2, torch.compile",
            "llama3_full_inductor_block_bucketing_overlap_cudagraph": "outside, recorded",
            "llama3_whole_step_fused_cudagraph": "in the graph, recorded"}
"""Steps with like settings: gathered weights are kept after the forward, and the loss is compiled."""
LEAD = 50  # microseconds that a tail's picture shows before the end of its first launch
Row = tuple[str, str, tuple[str, ...]]
"""A line of a small program: its name, its kind (input, view, compute or update), and the names that it takes."""
TASK: list[Row] = [("w", "input", ()), ("g", "input", ()), ("t", "view", ("w",)), ("t_1", "view", ("t",)),
                   ("up", "update", ("w", "g")), ("mm", "compute", ("t_1", "g"))]


def lines_of(gm: GraphModule, *, after: str = "", upto: str = "") -> str:
    """The graph's program behind the node `after` and up to `upto`; by default from the first or to the last line."""
    lines = [text for text in program(gm).splitlines() if not text.startswith("#")]
    names = [text.partition(":")[0] for text in lines]
    first = names.index(after) + 1 if after else 0
    last = names.index(upto) + 1 if upto else len(lines)
    short = (re.sub(r": not recorded|, dtype=torch.float32, device.*pin_memory=False", "", text)
             for text in lines[first:last])
    return "\n".join(textwrap.fill(text, 100, subsequent_indent=" " * 8) for text in short)


def traffic(joined: StepGraph) -> dict[str, tuple[int, int]]:
    """Bytes (read, written) of gradients, parameters and states by norm, scaling and update. Scalars are left out."""
    nodes = {node.name: node for node in joined.graph.graph.nodes}
    updates = updates_of(joined.graph)
    raw = [nodes[name] for name in joined.gradients.values()]
    found = {}
    for part in ("norm", "scaling"):
        bytes_read = sum(_size(gradient) for gradient in raw for user in gradient.users
                         if user not in updates and (user.target is torch.ops.aten.mul.Tensor) == (part == "scaling"))
        found[part] = bytes_read, bytes_read if part == "scaling" else 0
    read = written = 0
    for update in updates:
        parameters, gradients, *states = (sum(map(_size, each)) for each in lists_of_update(update)[:4])
        read += parameters + gradients + sum(states)
        scales = update.kwargs.get("grad_scale") is not None  # then it writes the scaled gradient back
        written += parameters + sum(states) + (gradients if scales else 0)
    return found | {"update": (read, written)}


def gradient_bytes(joined: StepGraph) -> tuple[int, str, Table]:
    """Bytes of gradients that norm, scaling and update read together; how; a table of all traffic."""
    moved = traffic(joined)
    updated = sum(_size(gradient) for update in updates_of(joined.graph) for gradient in lists_of_update(update)[1])
    rows = [*((part, *found) for part, found in moved.items()), ("sum", *map(sum, zip(*moved.values(), strict=True)))]
    return (moved["norm"][0] + moved["scaling"][0] + updated,
            "Norm and scaling each read the gradient once, and the update reads its scaled copy.",
            table("bytes of one weight, its gradient and states", ("part", "read", "written"), rows))


def _size(node: Node) -> int:
    return tensor_bytes(node.meta["val"])


def elements_of_1b(layers: int) -> int:
    """The number of parameters of a llama3 1b with so many layers."""
    with fake_world(1) as world:
        changes = {"mesh.dp_shard": 1, "mesh.tp": 1, "model.flavor": "1b", "model.n_layers": layers}
        authored = author(load_recipe("llama3").override(changes), world)
    return sum(p.numel() for p in authored.module.parameters())


def steps_on_gpus() -> Table:
    """Timed steps of llama3 on two GPUs with like settings, with clipping and AdamW outside the graphs and inside."""
    rows = []
    for flavor in ("1b", "8b"):
        runs: dict[str, list[dict[str, Any]]] = {}
        for run in json_lines(results_dir() / f"like_{flavor}_h200x2.jsonl"):
            runs.setdefault(run["variant"], []).append(run)
        for variant, title in VARIANTS.items():
            if variant in runs:
                first, *_ = of_variant = runs[variant]
                steps = ", ".join(f"{run['step_ms']:.1f}" for run in of_variant)
                peak = max(run.get("first_peak_gib", run["peak_gib"]) for run in of_variant)
                reserved = max(run["reserved_gib"] for run in of_variant)
                rows.append((flavor, title, steps, f"{first['launches']:,}", f"{peak:.1f}", f"{reserved:.1f}"))
    return table("steps of llama3 on two H200, timed", (
        "model", "clipping and AdamW", "step, ms", "launches", "peak, GiB", "reserved, GiB"), rows)


@dataclass(frozen=True)
class Tail:
    """Milliseconds in which kernels of clipping and of AdamW run, at the end of a traced step."""

    clip_ms: float
    adamw_ms: float


def tail_of(step: TracedStep) -> Tail:
    """The part of a traced step from the fill of the norm's buffer on. It runs on one stream."""
    tail = step.events[_first_of_tail(step):]
    busy = {kind: sum(e.end - e.begin for e in tail if ("FusedOptimizer" in e.name) == kind) for kind in (True, False)}
    return Tail(busy[False] / 1e3, busy[True] / 1e3)


def _first_of_tail(step: TracedStep) -> int:
    first = next(i for i, event in enumerate(step.events) if "multi_tensor_apply" in event.name)
    return first - ("FillFunctor" in step.events[first - 1].name)


def tail_pace(step: TracedStep) -> Pace:
    """From the first launch of a traced step's tail to its end: the launches of the tail, and all work of the GPU.

    A trace says when a launch ended. Launches less than 30 microseconds apart are one interval.
    """
    before, tail = step.events[_first_of_tail(step) - 1], step.events[_first_of_tail(step):]
    launched = sorted(event.launched for event in tail if event.launched is not None)
    begin, end = launched[0] - LEAD, max(event.end for event in tail)
    worked = union((max(event.begin, begin) - begin, event.end - begin) for event in step.events if event.end > begin)
    count = sum(not event.name.startswith("Mem") for event in tail)
    return Pace("traced", count, launched[-1] - launched[0], sum(stop - start for start, stop in worked), end - begin,
                tuple(union(((time - begin - 10, time - begin) for time in launched), near=20)), tuple(worked),
                "tail", before.end - begin)


def saves_bytes(answer: Any, *, without: StepGraph, fused: StepGraph) -> tuple[float, str]:
    """Grades a number of bytes by the traffic of two joined graphs."""
    moved = [sum(map(sum, traffic(joined).values())) for joined in (without, fused)]
    saved = moved[0] - moved[1]
    return by_slips(answer, saved, {
        "too low: elements, not bytes": saved / 4, "too high: a write of each gradient is left": 2 * saved})


def late_reads(rows: Sequence[Row]) -> dict[str, str]:
    """For each input that is read behind its update, the first node that does so, by the lint check."""
    graph, made = Graph(), dict[str, Node]()
    operators: dict[str, Callable[[list[Node]], tuple[Any, tuple[Any, ...]]]] = {
        "view": lambda given: (torch.ops.aten.t.default, tuple(given)),
        "compute": lambda given: (torch.ops.aten.cat.default, (given,)),
        "update": lambda given: (torch.ops.aten.add_.Tensor, tuple(given))}
    for name, kind, takes in rows:
        if kind == "input":
            made[name] = graph.placeholder(name)
        else:
            target, args = operators[kind]([made[taken] for taken in takes])
            made[name] = graph.create_node("call_function", target, args, name=name)
    graph.output(())
    found = (re.match(r"(\w+) is read by (\w+) after", said) for said in
             stale_reads(GraphModule(torch.nn.Module(), graph)))
    return {match[1]: match[2] for match in found if match}


def _cases() -> Iterator[tuple[str, list[list[Row]]]]:
    """Programs by what they test; the programs of a case count as one."""
    inputs: list[Row] = [("w", "input", ()), ("v", "input", ()), ("g", "input", ())]
    update: Row = ("up", "update", ("w", "g"))
    yield "a read after the update", [[*inputs, update, ("mm", "compute", ("w",))]]
    yield "the program of the task", [TASK]
    yield "a read before the update", [[*inputs, ("mm", "compute", ("w", "g")), update]]
    yield "another input", [[*inputs, update, ("mm", "compute", ("v",))]]
    yield "two reads after the update", [[*inputs, update, ("mm", "compute", ("v", "w")), ("mm_1", "compute", ("w",))]]
    yield "a view that nobody reads", [[*inputs, update, ("t", "view", ("w",)), ("mm", "compute", ("v",))]]
    seed = random.Random(15)
    yield "programs at random", [[*inputs, *_at_random(seed)] for _ in range(20)]


def _at_random(seed: random.Random) -> Iterator[Row]:
    names, open_inputs = ["w", "v"], ["w", "v"]
    for number in range(10):
        kind = seed.choice(("view", "compute", "compute", "update"))
        if kind == "update" and open_inputs:
            yield f"up_{number}", kind, (open_inputs.pop(seed.randrange(len(open_inputs))), seed.choice(names))
        elif kind == "view":
            yield f"t_{number}", kind, (seed.choice(names),)
            names.append(f"t_{number}")
        else:
            yield f"mm_{number}", "compute", tuple(seed.sample(names, 2))


def finds(answer: Any) -> tuple[float, str]:
    """Grades a function from rows to late reads by what lint finds in the same programs.

    The message names the first kind of case that is wrong. A wrong read after the update scores 0.
    """
    if not callable(answer):
        return 0.0, "give a function of a list of rows"
    return by_cases(answer, _cases(), _problem, "a read after the update")


def _problem(answer: Callable[[list[Row]], Any], programs: list[list[Row]]) -> str:
    for rows in programs:
        wanted = late_reads(rows)
        try:
            got = answer(list(rows))
        except Exception as error:  # the reader's code
            return f"{type(error).__name__}: {error}"
        if got != wanted:
            return f"got {got}, wanted {wanted}"
    return ""
