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
from workbench.notebook.draw.timeline import runs_of
from workbench.notebook.views import GraphView, KernelView, MemoryView, PassStepper, TimelineView
from workbench.notebook.views.controls import Controlled, OwnData
from workbench.notebook.views.page import PageScript
from workbench.notebook.views.placement import Placed, words
from workbench.passes.cudagraph import CUDAGraphRunner
from workbench.pipeline.build import Built
from workbench.pipeline.expert_load import ExpertLoad
from workbench.pipeline.report import Report
from workbench.pipeline.train import Training
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
from workbench.torch_api.garbage import uncollected
from workbench.world.mesh import World

_GRAPHS = Built | JointGraph | ForwardBackward | GraphModule
VIEWS: dict[str, Any] = {
    "graph": _GRAPHS,
    "passes": Built | PassRecord | Sequence,
    "timeline": _GRAPHS | PassRecord | StepTimeline | Mapping,
    "memory": _GRAPHS | PassRecord,
}
"""The pictures that can be asked for by name, and whose they are."""


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
    shown = outputs(what, view, device, measured)
    if not shown:
        asked = f" for view {view!r}" if view else ""
        raise WorkbenchError(
            f"{type(what).__name__} has no picture{asked}: show takes a recipe, world, graph, pass "
            "record, verdict, lesson, build, report, experts' load, timeline run, what-if study or "
            "difference, or DTensor"
        )
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    for i, output in enumerate(shown):
        if isinstance(output, Controlled):
            output.twins = _twins(output, shown[:i])
        if get_ipython() is not None:
            display(output)
        elif not isinstance(output, Controlled | PageScript):
            print(output)


def _twins(view: Controlled, above: Sequence[Any]) -> int:
    """How many static outputs right above a view show the same: its pictures, or the table of its title."""
    return len(list(takewhile(lambda item: isinstance(item, draw.Picture) or item.title == view.title,
                              reversed(above))))


def outputs(what: Any, view: str = "", device: str = "h100",
            measured: int | StepTimeline | None = None) -> list[Any]:
    """The outputs of `show`, in order; empty where there is nothing to draw."""
    if view and not isinstance(what, VIEWS[view]):
        return []
    if view in ("timeline", "memory"):
        return _clocked(what, view, device, measured)
    if isinstance(what, Built):
        return _built(what, view)
    if isinstance(what, Recipe | Report):
        return [draw.pipeline(what)]
    if isinstance(what, JointGraph):
        placement = _placement(what.authored)
        return [draw.graph(what.graph),
                GraphView({"joint": what.graph}, placement=placement, title="joint graph")]
    if isinstance(what, ForwardBackward):
        placement = _placement(what.authored)
        return [*map(draw.graph, what.graphs),
                GraphView(what.by_part, placement=placement, title="forward and backward")]
    if isinstance(what, GraphModule):
        return [draw.graph(what), GraphView(what)]
    if isinstance(what, PassRecord):
        return _record(what)
    if isinstance(what, Sequence) and what and all(isinstance(item, PassRecord) for item in what):
        return [draw.verdicts(what), PassStepper(what)]
    if hasattr(what, "pictured"):  # a plugin's
        return outputs(what.pictured())
    if isinstance(what, OwnData) and hasattr(what, "picture"):  # a lesson's
        return [what.picture(), what, PageScript()]
    if isinstance(what, Training):
        what = what.load
    itself = isinstance(what, World | Verdict | ExpertLoad | DTensor | draw.Table)
    return [what] if itself or hasattr(what, "_repr_markdown_") else []  # which a lesson has


def _built(built: Built, view: str) -> list[Any]:
    if view == "graph":
        return outputs(built.step.pair)
    passes: list[Any] = []
    if built.records:
        stepper = PassStepper(built.records, _placement(built.authored))
        passes = [draw.verdicts(built.records), stepper]
    return passes if view else [draw.pipeline(built), *passes]


def _record(record: PassRecord) -> list[Any]:
    """A pass that returns no graph shows its kernels, or what its CUDA graphs read."""
    if record.stage is Stage.REPLAY:
        lines = [
            (body.facts.summary(),)
            for body in record.after
            if isinstance(body, CUDAGraphRunner)
        ]
        return [draw.table(record.name, ("CUDA graphs",), lines)] if lines else []
    if record.stage is Stage.LOWERING:
        kernels = kernels_of(record.before, record.after)
        view = KernelView(kernels, record.name)
        lines = [(graph.summary(),) for graph in kernels]
        return [draw.table(record.name, ("kernels",), lines), view]
    changes = draw.changes(record)
    return [changes, PassStepper([record], title=changes.title)]


def _clocked(what: Any, view: str, device: str, measured: int | StepTimeline | None) -> list[Any]:
    if measured is not None and isinstance(measured, StepTimeline) != (view == "timeline"):
        wanted = "a peak in bytes"
        if view == "timeline":
            wanted = "a StepTimeline, as measured(step, pair) returns it"
        raise WorkbenchError(f"show(..., {view!r}, measured=...) takes {wanted}")
    known = None
    if isinstance(what, Built):
        known, what = what.known, what.step.pair
    if isinstance(what, JointGraph):
        what = what.graph
    if view == "timeline":
        with uncollected():
            runs = runs_of(what, device, known)  # once for both
        if isinstance(measured, StepTimeline):
            runs["measured"] = measured
        return [draw.timeline(runs), TimelineView(runs), PageScript()]
    peak = measured if isinstance(measured, int) else None
    return [draw.memory(what, peak), MemoryView(what, peak), PageScript()]


def _placement(authored: Authored) -> Placed:
    """A function from a parameter's or buffer's name to its placement in words."""
    tensors = dict(authored.module.named_buffers()) | dict(authored.module.named_parameters())

    def placement(name: str) -> str:
        if name not in tensors:
            return ""
        tensor = tensors[name]
        return words(tensor) if isinstance(tensor, DTensor) else "whole on every rank"

    return placement
