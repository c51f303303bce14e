"""`show`: the picture of any of the workbench's objects, and an interactive view below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from workbench.authoring.authored import Authored
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Verdict
from workbench.errors import WorkbenchError
from workbench.graph.callables import kernels_of
from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.simulated_run import StepTimeline
from workbench.notebook import draw
from workbench.notebook.draw.mesh import words
from workbench.notebook.draw.timeline import runs_of
from workbench.notebook.lessons.lesson import Lesson
from workbench.notebook.moments.moment import Moment
from workbench.notebook.moments.page import PageScript
from workbench.notebook.views import GraphView, KernelView, MemoryView, PassStepper, TimelineView
from workbench.notebook.views.controls import Controlled
from workbench.notebook.views.placement import Placed
from workbench.pipeline.build import Built
from workbench.pipeline.expert_load import ExpertLoad
from workbench.pipeline.report import Report
from workbench.pipeline.train import Training
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
from workbench.tools.variant import Difference
from workbench.tools.what_if import Study
from workbench.torch_api.garbage import uncollected
from workbench.world.mesh import World

VIEWS = ("graph", "passes", "timeline", "memory")


def show(
    what: Any, view: str = "", *, device: str = "h100", measured: int | StepTimeline | None = None
) -> None:
    """Display a static picture of `what`, and then, as a separate output, the view to explore it.

    `view` selects one of an object's pictures: "graph", "passes", "timeline" (simulated on `device`) or "memory". The
    timeline of a build, and of its records, charges fused kernels where a compiler follows, and launches where nothing
    is replayed; that of a graph charges each operator as a kernel, and no launch.
    `measured` is drawn beside the estimate: a GPU's timeline, or its peak in bytes. Outside a notebook the text forms
    are printed.
    Raises WorkbenchError for an object without such a picture, and lists those that have one.
    """
    if view not in ("", *VIEWS):
        raise WorkbenchError(f"show(..., {view!r}): view must be one of {', '.join(VIEWS)}")
    made = outputs(what, view, device, measured)
    if not made:
        raise WorkbenchError(
            f"{type(what).__name__} has no picture"
            + (f" for view {view!r}" if view else "")
            + ": show takes a recipe, world, graph, pass record, verdict, lesson, build, report, "
            "experts' load, timeline run, what-if study or difference, or DTensor"
        )
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    for i, output in enumerate(made):
        if isinstance(output, Controlled):
            output.twins = _twins(output, made[:i])
        if get_ipython() is not None:
            display(output)
        elif not isinstance(output, Controlled | PageScript):
            print(output)


def _twins(view: Controlled, above: Sequence[Any]) -> int:
    """How many static outputs right above a view show the same: its pictures, or the table of its title."""
    return len(list(takewhile(lambda each: isinstance(each, draw.Picture) or each.title == view.title,
                              reversed(above))))


def outputs(what: Any, view: str = "", device: str = "h100",
            measured: int | StepTimeline | None = None) -> list[Any]:
    """The outputs of `show`, in order; empty where there is nothing to draw."""
    if view in ("timeline", "memory"):
        return _clocked(what, view, device, measured)
    if view == "graph" and isinstance(what, Built):
        what = what.step.pair
    having = {
        "graph": JointGraph | ForwardBackward | GraphModule,
        "passes": Built | PassRecord | Sequence,
    }
    if view and not isinstance(what, having[view]):
        return []
    if isinstance(what, Recipe | Report):
        return [draw.pipeline(what)]
    if isinstance(what, Built):
        placed = _placement(what.authored)
        views = (
            [draw.verdicts(what.records), PassStepper(what.records, placed)] if what.records else []
        )
        return views if view == "passes" else [draw.pipeline(what), *views]
    if isinstance(what, JointGraph):
        return [
            draw.graph(what.graph),
            GraphView(
                {"joint": what.graph}, placement=_placement(what.authored), title="joint graph"
            ),
        ]
    if isinstance(what, ForwardBackward):
        return [
            *map(draw.graph, what.graphs),
            GraphView(
                what.by_part, placement=_placement(what.authored), title="forward and backward"
            ),
        ]
    if isinstance(what, GraphModule):
        return [draw.graph(what), GraphView(what)]
    if isinstance(what, Training):
        what = what.load
    if isinstance(what, ExpertLoad):
        return [draw.expert_load(what)]
    if isinstance(what, PassRecord):
        return _record(what)
    if isinstance(what, Sequence) and what and all(isinstance(each, PassRecord) for each in what):
        return [draw.verdicts(what), PassStepper(what)]
    if isinstance(what, Difference):
        return [draw.difference(what), draw.verdicts_of_both(what)]
    if isinstance(what, Study):
        return outputs(what.records) or [draw.graph(what.joint.graph)]
    if isinstance(what, Moment):
        return [what.picture(), what, PageScript()]
    if isinstance(what, Verdict):
        return [draw.table(what.check, ("outcome", "why"), [(str(what.outcome), what.message)])]
    if isinstance(what, World):
        rows = [(what.kind, what.size, what.rank, str(what.device))]
        return [draw.table("world", ("kind", "ranks", "this rank", "device"), rows)]
    if isinstance(what, Lesson):
        return [draw.table(what.question, ("checkpoint", "what to do"), [(c.name, c.task) for c in what.checkpoints])]
    if isinstance(what, DTensor):
        return [draw.placements(what, "tensor")]
    return []


def _record(record: PassRecord) -> list[Any]:
    """A pass that returns no graph shows its kernels, or its CUDA graphs' inputs."""
    if record.stage is Stage.REPLAY:
        return [draw.replay(record)]
    if record.stage is Stage.LOWERING:
        found = kernels_of(record.before, record.after)
        return [draw.kernels(record), KernelView(found, record.name)]
    return [draw.step(record), PassStepper([record], title=record.name)]


def _clocked(what: Any, view: str, device: str, measured: int | StepTimeline | None) -> list[Any]:
    if measured is not None and isinstance(measured, StepTimeline) != (view == "timeline"):
        raise WorkbenchError(
            f"show(..., {view!r}, measured=...) takes "
            + (
                "a StepTimeline, as measured(step, pair) returns it"
                if view == "timeline"
                else "a peak in bytes"
            )
        )
    known = None
    if isinstance(what, Built):
        known, what = what.known, what.step.pair
    if isinstance(what, JointGraph):
        what = what.graph
    if view == "timeline" and isinstance(
        what, GraphModule | ForwardBackward | PassRecord | StepTimeline | Mapping
    ):
        with uncollected():
            runs = runs_of(what, device, known)  # once for both
        if isinstance(measured, StepTimeline):
            runs["measured"] = measured
        return [draw.timeline(runs), TimelineView(runs), PageScript()]
    if isinstance(what, GraphModule | ForwardBackward | PassRecord) and not isinstance(
        measured, StepTimeline
    ):
        return [draw.memory(what, measured), MemoryView(what, measured), PageScript()]
    return []


def _placement(authored: Authored) -> Placed:
    """A function from a parameter's or buffer's name to its placement in words."""
    held = dict(authored.module.named_buffers()) | dict(authored.module.named_parameters())

    def said(name: str) -> str:
        tensor = held.get(name)
        return words(tensor) if isinstance(tensor, DTensor) else "whole on every rank" if tensor is not None else ""

    return said
