"""What "One graph for the whole step" prints, counts and asks: a graph's lines, memory, traffic, steps, late reads."""

from __future__ import annotations

import itertools
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.authoring.author import author
from workbench.checks.lint import stale_reads
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.graph.read.nodes import lists_of_update, updates_of
from workbench.graph.read.peak import live_bytes
from workbench.graph.read.program import program
from workbench.lab.traces.trace_file import TracedStep
from workbench.lab.whole_step.join import StepGraph, Update, join
from workbench.notebook.draw.picture import Table, table
from workbench.pipeline.gpu_communication import union
from workbench.pipeline.run_passes import run_partitioned
from workbench.recipe.recipe import load_recipe
from workbench.tools.compatibility import results_dir
from workbench.torch_api.ops import tensor_bytes
from workbench.world.fake import fake_world
from workbench_lessons.course.grading import by_cases
from workbench_lessons.course.recorded_figures import json_lines
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import Pace
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import Memory

VARIANTS = {"compile_keep_loss": "outside: FSDP2, torch.compile",
            "llama3_full_inductor_block_bucketing_overlap_cudagraph": "outside, recorded",
            "llama3_whole_step_fused_cudagraph": "in the graph, recorded"}
"""Steps with like settings: gathered weights are kept after the forward, and the loss is compiled."""
LEAD = 50  # microseconds that a tail's picture shows before the end of its first launch
Row = tuple[str, str, tuple[str, ...]]
"""A line of a small program: its name, its kind (input, view, compute or update), and the names that it takes."""
TASK: list[Row] = [("w", "input", ()), ("g", "input", ()), ("t", "view", ("w",)), ("t_1", "view", ("t",)),
                   ("up", "update", ("w", "g")), ("mm", "compute", ("t_1", "g"))]


def lines_of(gm: GraphModule, *, after: str, leave_out: tuple[str, str] | None = None) -> str:
    """The graph's program behind the node `after`. leave_out: the first and last of the nodes that become dots."""
    lines = [text for text in program(gm).splitlines() if not text.startswith("#")]
    names = [text.partition(":")[0] for text in lines]
    short = [re.sub(r": not recorded|, dtype=torch.float32, device.*pin_memory=False", "", text)
             for text in lines[names.index(after) + 1:]]
    if leave_out is not None:
        first, last = map(names.index, leave_out)
        begin = first - names.index(after) - 1
        short[begin:begin + last - first + 1] = [f"... ({last - first + 1} lines)"]
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


def memory_of_1b(tokens: int) -> dict[str, Memory]:
    """The memory of a llama3 1b with four layers, on one rank and for one sequence of so many tokens.

    Three steps: with one AdamW, with early updates, and with both early updates and clipping.
    """
    changes = {"mesh.dp_shard": 1, "mesh.tp": 1, "model.flavor": "1b", "model.n_layers": 4, "data.seq_len": tokens,
               "data.batch_per_rank": 1, "precision.param": "bfloat16"}
    found = {}
    with fake_world(1) as world:
        pair = partition(capture(author(load_recipe("llama3").override(changes), world)))
        plain = join(pair, Update(clip=None))
        order = [node.name for node in plain.graph.graph.nodes]
        last = max(map(order.index, plain.gradients.values()))
        places = {name: i / len(order) for i, name in enumerate(order[:last + 1])}
        for said, clip, passes in (("one AdamW", None, ()), ("early_updates", None, ("early_updates",)),
                                   ("early_updates and clipping", 1.0, ("early_updates",))):
            whole = join(pair, Update(clip=clip))
            run_partitioned(whole, passes)
            live = live_bytes(whole.graph)
            found[said] = Memory(live.input_bytes, live.curve, _places(live.nodes, places))
    return found


def _places(nodes: Sequence[str], known: Mapping[str, float]) -> list[float]:
    """Each node's place in another step that has most of them; the last ones fill the rest, up to 1."""
    end = max(i for i, name in enumerate(nodes) if name in known)
    found = list(itertools.accumulate((known.get(name, 0.0) for name in nodes[:end + 1]), max))
    rest = len(nodes) - 1 - end
    return found + [found[-1] + (1 - found[-1]) * i / rest for i in range(1, rest + 1)]


def lowered_peak(steps: Mapping[int, Mapping[str, Memory]]) -> int | str:
    """The one of two lengths at which early updates lower the peak of `memory_of_1b`; "both", or "neither"."""
    lower = [tokens for tokens, found in steps.items() if found["early_updates"].peak < found["one AdamW"].peak]
    return lower[0] if len(lower) == 1 else "both" if lower else "neither"


def steps_on_gpus() -> tuple[float, Table]:
    """The mean ms of the joined 8b step; timed steps of llama3 on two GPUs with like settings, outside and joined."""
    rows, mean = [], 0.0
    for flavor in ("1b", "8b"):
        runs: dict[str, list[dict[str, Any]]] = {}
        for run in json_lines(results_dir() / f"like_{flavor}_h200x2.jsonl"):
            runs.setdefault(run["variant"], []).append(run)
        for variant, title in VARIANTS.items():
            if variant in runs:
                first, *_ = of_variant = runs[variant]
                steps = ", ".join(f"{run['step_ms']:.1f}" for run in of_variant)
                reserved = max(run["reserved_gib"] for run in of_variant)
                mean = sum(run["step_ms"] for run in of_variant) / len(of_variant)  # of the last row, in the end
                rows.append((flavor, title, steps, f"{mean:.1f}", f"{first['launches']:,}", f"{reserved:.1f}"))
    return round(mean, 1), table("steps of llama3 on two H200, two runs each", (
        "model", "clipping and AdamW", "step, ms", "mean", "launches", "reserved, GiB"), rows)


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
