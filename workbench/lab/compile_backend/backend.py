"""`as_backend`: a backend for `torch.compile` that runs our passes, with their verdicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import SymInt
from torch.distributed.tensor import DTensor

from workbench.authoring.authored import Authored
from workbench.checks.verdicts import Verdict
from workbench.errors import WorkbenchError
from workbench.graph.capture import authored_facts, settle
from workbench.graph.facts import GraphFacts, Known, set_facts
from workbench.graph.partition import Partitioned
from workbench.graph.read.collectives import list_collectives
from workbench.lab.compile_backend.torch_api import JointFromCompile, through_autograd
from workbench.pipeline.report import memory_of
from workbench.pipeline.report_text import memory_changes, said, unchecked, verdict_grid
from workbench.pipeline.run_passes import (
    JOINT,
    PassRecord,
    capture_decompositions,
    choose,
    each_no_effect,
    run_joint,
    run_partitioned,
)
from workbench.pipeline.stages import lower, passes_before
from workbench.recipe.contracts import Stage, check_passes
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec, listed
from workbench.recipe.wording import counted
from workbench.torch_api.ops import world_kind
from workbench.torch_api.supported import require_compiler

LATER = (Stage.PARTITIONED, Stage.LOWERING)
"""No replays: torch.compile may compile again, and drop what was recorded. No whole step: it hands over two graphs."""
OUTSIDE = (
    "FSDP2's hooks, and DDP's, communicate outside of the graph, where no pass sees it: call workbench.adopt(model) "
    "before torch.compile"
)
NOT_RUN = "no graph is run while torch.compile compiles: compare with eager, or run a recipe at level full"


@dataclass
class CompiledGraph:
    """One graph of torch.compile. pair: the forward and the backward after the last pass. schedule: whether the ranks'
    collectives agree.
    """

    pair: Partitioned = field(repr=False)
    schedule: Verdict

    @property
    def records(self) -> list[PassRecord]:
        return self.pair.known.records


class Backend:
    """What `as_backend` returns: pass it to `torch.compile(module, backend=...)`.

    graphs: one entry for each graph that was compiled with its backward; several where the module breaks the graph, or
    is compiled again for other shapes. records: those of all graphs, in order. forward_only: the number of graphs
    without a backward, as under `torch.no_grad()`; they run without passes, since passes transform whole steps.
    """

    def __init__(
        self,
        joint_passes: list[PassSpec],
        passes: list[PassSpec],
        authored: Authored | None,
        strict: bool,
        may_be_idle: Sequence[str],
    ) -> None:
        self.joint_passes, self.passes = joint_passes, passes
        self.authored, self.strict, self.may_be_idle = authored, strict, may_be_idle
        self.graphs: list[CompiledGraph] = []
        self.forward_only = 0
        self.__name__ = "workbench"  # for torch's messages

    @property
    def records(self) -> list[PassRecord]:
        return [record for graph in self.graphs for record in graph.records]

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs. torch wraps errors from here in BackendCompilerFailed."""
        self._require_static(example_inputs)
        joints: list[JointFromCompile] = []

        def joint(traced: JointFromCompile) -> None:
            set_facts(traced.graph, self._facts(example_inputs))
            settle(traced.graph)
            traced.known = Known()
            joints.append(traced)
            run_joint(traced, self.joint_passes)

        table = capture_decompositions(self.joint_passes)
        function, slots = through_autograd(graph, example_inputs, joint=joint, decompositions=table)
        if slots is None:
            self.forward_only += 1
            return function
        pair = Partitioned(slots)
        pair.cut_from(joints[0].graph, joints[0].known)
        run_partitioned(pair, self.passes)
        self.graphs.append(CompiledGraph(pair, lower(pair)))
        self._report_idle(pair.known.records)
        return function

    def _require_static(self, example_inputs: Sequence[Any]) -> None:
        if not any(isinstance(value, SymInt) for value in example_inputs):
            return
        for spec in self.passes:
            if "static_shapes" in choose(spec, LATER, "as_backend")[0].contract.needs:
                raise WorkbenchError(
                    f"pass {spec.name!r} needs sizes that are known, and torch.compile left one open, as it does at a "
                    "second length: call torch.compile(..., dynamic=False), which compiles each length"
                )

    def _facts(self, example_inputs: Sequence[Any]) -> GraphFacts:
        if self.authored is not None:
            return authored_facts(self.authored)
        return GraphFacts("joint", *_groups(example_inputs), world_kind() or "one process")

    def _report_idle(self, records: list[PassRecord]) -> None:
        idle = [
            f"{name}: {why}"
            for name, why in each_no_effect(records)
            if name not in self.may_be_idle
        ]
        if self.strict and idle:
            raise WorkbenchError("these passes had no effect: " + "; ".join(idle))
        for text in idle:
            warnings.warn(f"a pass had no effect: {text}", stacklevel=2)

    def table(self) -> str:
        """The verdicts as text: a row for each pass, a column for each check, and the reasons below."""
        if not self.graphs:
            return f"{self!r}: call the compiled module first; a model under fully_shard is adopted before"
        lines = [repr(self)]
        for graph in self.graphs:
            lines += [
                "",
                *verdict_grid([(record.name, record.verdicts) for record in graph.records]),
            ]
            for record in graph.records:
                reasons = [
                    f"{verdict.check}: {said(verdict)}"
                    for verdict in record.verdicts
                    if said(verdict)
                ]
                lines += [
                    f"  {record.name}: {text}"
                    for text in (*reasons, *memory_changes(memory_of(record)))
                ]
            lines.append(f"  all ranks: {graph.schedule}")
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            if ranks > 1 and not any(map(list_collectives, graph.pair.graphs)):
                lines.append(f"  no collective here, on {ranks} ranks: {OUTSIDE}")
        every = [record.verdicts for record in self.records]
        missing = unchecked(every, [graph.schedule for graph in self.graphs], NOT_RUN)
        return "\n".join(
            [
                *lines,
                "",
                *(f"not checked: {', '.join(checks)}: {why}" for why, checks in missing.items()),
            ]
        )

    def __repr__(self) -> str:
        names = ", ".join(spec.name for spec in (*self.joint_passes, *self.passes)) or "no passes"
        alone = f", {self.forward_only} without a backward" if self.forward_only else ""
        return f"Backend({names}: {counted(len(self.graphs), 'graph')} compiled{alone})"


def _groups(example_inputs: Sequence[Any]) -> tuple[dict[str, str], dict[str, int]]:
    """Mesh axis to process group, and group to size, of all meshes of the inputs.

    Axes without names are called axis0, axis1; further groups of an axis get a number, such as dp.1, as passes expect.
    """
    groups: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for mesh in dict.fromkeys(
        value.device_mesh for value in example_inputs if isinstance(value, DTensor)
    ):
        axes = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
        for i, (axis, size) in enumerate(zip(axes, mesh.shape, strict=True)):
            name = str(mesh.get_group(i).group_name)
            if name not in sizes:
                groups[f"{axis}.{len(groups)}" if axis in groups else axis] = name
                sizes[name] = size
    return groups, sizes


def as_backend(
    pipeline: Recipe | Sequence[PassSpec | str | Mapping[str, Any]],
    *,
    authored: Authored | None = None,
    strict: bool = False,
) -> Backend:
    """A backend for `torch.compile` that runs these passes, with verdicts on each.

        backend = as_backend(["activation_checkpointing", "graph_cleanup"])
        step = torch.compile(module, backend=backend)
        step(x).sum().backward()
        print(backend.table())

    pipeline: a recipe, for its two lists of passes, or one list, joint passes first: names, or tables with options. The
    joint ones run on the joint graph, the others on forward and backward, at the first call. authored: the `Authored`
    of the module that is compiled, for passes that need its blocks; process groups of other modules are read from their
    DTensors. strict: a pass without effect is an error instead of a warning. Every rank must compile at the same call,
    since the ranks then compare their collectives.

    Raises WorkbenchError for a list that breaks a rule, and for a pass that cannot work under torch.compile.
    """
    if isinstance(pipeline, Recipe):
        joint, later, free_order = [*pipeline.joint_passes], [*pipeline.passes], pipeline.free_order
        strict, idle = strict or pipeline.strict, pipeline.expect.no_effect
    else:
        specs = [PassSpec.model_validate(spec) for spec in listed(pipeline, "as_backend")]
        joint = passes_before(specs, set(Stage) - {Stage.JOINT})
        later, free_order, idle = specs[len(joint):], False, ()
    for spec in joint:
        choose(spec, JOINT, "as_backend")
    for spec in later:
        item, _ = choose(spec, LATER, "as_backend, after its joint passes,")
        if "compiler" in item.contract.needs:
            require_compiler()
    names = [[spec.name for spec in specs] for specs in (joint, later)]
    if problems := check_passes(*names, free_order=free_order):
        raise WorkbenchError("; ".join(problems))
    return Backend(joint, later, authored, strict, idle)
