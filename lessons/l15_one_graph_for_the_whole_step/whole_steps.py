"""What "One graph for the whole step" prints, counts and asks: a graph's lines, traffic, recorded steps, late reads."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.authoring.author import author
from workbench.checks.lint import stale_reads
from workbench.errors import WorkbenchError
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
from workbench_lessons.l14_read_your_own_trace.traces_graded import near

RECORDED = results_dir() / "whole_step_h200x1.jsonl"
VARIANTS = {"compile": "outside, torch.compile", "llama3_calibrated_cudagraph": "outside",
            "llama3_whole_step_cudagraph": "in the graph",
            "llama3_whole_step_fused_cudagraph": "in the graph, fused_clip_adamw"}
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


def _size(node: Node) -> int:
    return tensor_bytes(node.meta["val"])


def elements_of_1b(layers: int) -> int:
    """The number of parameters of a llama3 1b with so many layers."""
    with fake_world(1) as world:
        changes = {"mesh.dp_shard": 1, "mesh.tp": 1, "model.flavor": "1b", "model.n_layers": layers}
        authored = author(load_recipe("llama3").override(changes), world)
    return sum(p.numel() for p in authored.module.parameters())


def steps_on_gpus() -> Table:
    """The timed steps of llama3 with clipping and AdamW outside of the graphs and inside: on one GPU, and on two."""
    if not RECORDED.is_file():
        raise WorkbenchError(f"{RECORDED}: no such file of recorded results")
    one = {row["step"]: row for row in json_lines(RECORDED) if "cudagraph" in row["passes"]}
    rows = [("1b on 1 H200", said, f"{one[step]['step_ms']:.1f}", f"{one[step]['launches']}{more}",
             f"{one[step]['peak_bytes'] / 2**30:.1f}")
            for step, said, more in (("pair", "outside", " + the tail's"), ("whole", "in the graph", ""))]
    for flavor in ("1b", "8b"):
        found: dict[str, list[dict[str, Any]]] = {}
        for run in json_lines(RECORDED.with_name(f"llama3_{flavor}_h200x2.jsonl")):
            if "step_ms" in run and run["changes"]["mesh.tp"] == "1":
                found.setdefault(run["variant"], []).append(run)
        rows += [(f"{flavor} on 2 H200", said, ", ".join(f"{run['step_ms']:.1f}" for run in found[name]),
                  f"{found[name][0]['launches']:,}", f"{max(run['reserved_gib'] for run in found[name]):.1f}")
                 for name, said in VARIANTS.items() if name in found]
    return table("steps of llama3, timed", ("model", "clipping and AdamW", "step, ms", "launches", "GiB"), rows)


@dataclass(frozen=True)
class Tail:
    """Clipping and AdamW at the end of a traced step, in milliseconds.

    launches: of kernels. cpu_ms: from the CPU's first launch to its last. gpu_ms: in which a kernel runs, of it clip_ms
    and adamw_ms.
    """

    launches: int
    cpu_ms: float
    clip_ms: float
    adamw_ms: float

    @property
    def gpu_ms(self) -> float:
        return self.clip_ms + self.adamw_ms


def tail_of(step: TracedStep) -> Tail:
    """The part of a traced step from the fill of the norm's buffer on. It runs on one stream."""
    tail = step.events[_first_of_tail(step):]
    launched = sorted(event.launched for event in tail if event.launched is not None)
    busy = {kind: sum(e.end - e.begin for e in tail if ("FusedOptimizer" in e.name) == kind) for kind in (True, False)}
    launches = sum(not event.name.startswith("Mem") for event in tail)
    return Tail(launches, (launched[-1] - launched[0]) / 1e3, busy[False] / 1e3, busy[True] / 1e3)


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


def even_size(size: int, tail: Tail) -> float:
    """The elements on which the GPU works as long as the CPU launches the tail; `size`: those of `tail`."""
    return size * tail.cpu_ms / tail.gpu_ms


def counts_inputs(answer: Any, *, of: StepGraph) -> tuple[float, str]:
    """Grades a number of inputs of a joined graph."""
    truth, trained = len(of.graph.graph.find_nodes(op="placeholder")), len(of.trained)
    return by_slips(answer, truth, {
        "too low: one state for each parameter": truth - trained,
        "too high: a step count for each parameter": truth + trained - 1})


def saves_bytes(answer: Any, *, without: StepGraph, fused: StepGraph) -> tuple[float, str]:
    """Grades a number of bytes by the traffic of two joined graphs."""
    moved = [sum(map(sum, traffic(joined).values())) for joined in (without, fused)]
    saved = moved[0] - moved[1]
    return by_slips(answer, saved, {
        "too low: elements, not bytes": saved / 4, "too high: a write of each gradient is left": 2 * saved})


def tips_at(answer: Any, *, size: int, tail: Tail) -> tuple[float, str]:
    """Grades a number of elements by `even_size`."""
    truth = even_size(size, tail)
    return by_slips(answer, truth, {
        "a share of the traced model, not a number of elements": truth / size,
        "too high: the ratio of the two times is the other way round": size * size / truth}, partial(near, within=0.02))


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
