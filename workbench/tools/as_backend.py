"""`as_backend`: a backend for `torch.compile` that runs our passes, with their verdicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import DTensor

from workbench.authoring.authored import Authored
from workbench.checks.verdicts import Verdict, columns
from workbench.errors import WorkbenchError
from workbench.graph.capture import authored_facts, settle
from workbench.graph.facts import GraphFacts, Known, set_facts
from workbench.graph.partition import Partitioned
from workbench.passes.full_inductor_compilation import require_compiler
from workbench.passes.registry import find_pass
from workbench.pipeline.report_text import grid, memory_changes, outcomes, said, unchecked
from workbench.pipeline.run_passes import (
    PassRecord,
    capture_decompositions,
    choose,
    each_no_effect,
    run_joint,
    run_partitioned,
)
from workbench.pipeline.stages import lower
from workbench.recipe.contracts import Stage, check_passes
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec, listed
from workbench.recipe.wording import counted
from workbench.torch_api.compile_backend import JointFromCompile, held_by_module, through_autograd
from workbench.torch_api.ops import world_kind

Spec = PassSpec | str | Mapping[str, Any]
NOT_RUN = "no graph is run while torch.compile compiles: compare with eager, or run a recipe at level full"


@dataclass
class CompiledGraph:
    """One graph of torch.compile, and the record of each pass on it.

    pair: the forward and the backward after the last pass. schedule: whether the ranks' collectives agree.
    """

    records: list[PassRecord]
    pair: Partitioned = field(repr=False)
    schedule: Verdict


class Backend:
    """What `as_backend` returns: pass it to `torch.compile(module, backend=...)`.

    graphs: one entry for each graph that was compiled with its backward; several where the module breaks the graph, or
    is compiled again for other shapes. records: those of all graphs, in order. forward_only: the number of graphs
    without a backward, as under `torch.no_grad()`; they run without passes, since passes transform whole steps.
    """

    def __init__(self, joint_passes: list[PassSpec], passes: list[PassSpec], authored: Authored | None, strict: bool,
                 may_be_idle: Sequence[str]) -> None:
        self.joint_passes, self.passes = joint_passes, passes
        self.authored, self.strict, self.may_be_idle = authored, strict, tuple(may_be_idle)
        self.graphs: list[CompiledGraph] = []
        self.forward_only = 0
        self.__name__ = "workbench"  # for torch's messages

    @property
    def records(self) -> list[PassRecord]:
        return [record for graph in self.graphs for record in graph.records]

    def __call__(self, graph: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs. torch wraps errors from here in BackendCompilerFailed."""
        facts = self._facts(graph, example_inputs)
        joints: list[JointFromCompile] = []

        def joint(given: JointFromCompile) -> None:
            set_facts(given.graph, facts)
            settle(given.graph)
            given.known = Known()
            joints.append(given)
            run_joint(given, self.joint_passes)

        table = capture_decompositions(self.joint_passes)
        function, slots = through_autograd(graph, example_inputs, joint=joint, decompositions=table)
        if slots is None:
            self.forward_only += 1
            return function
        pair = Partitioned(slots)
        pair.cut_from(joints[0].graph, joints[0].known)
        run_partitioned(pair, self.passes)
        schedule = lower(pair)
        self.graphs.append(CompiledGraph(pair.known.records, pair, schedule))
        self._report_idle(pair.known.records)
        return function

    def _facts(self, graph: Any, example_inputs: Sequence[Any]) -> GraphFacts:
        if self.authored is not None:
            authored = self.authored
            known = {name for name, _ in authored.module.named_parameters(remove_duplicate=False)}
            held = held_by_module(graph, example_inputs).values()
            if strange := [name for name, parameter in held if parameter and name not in known]:
                raise WorkbenchError(
                    f"the compiled module has a parameter {strange[0]!r}, and the authored one has "
                    "none of that name: compile `authored.module`, or leave `authored` out"
                )
            return authored_facts(authored)
        groups, sizes = _groups(example_inputs)
        if not groups:
            for spec in (*self.joint_passes, *self.passes):
                if "fsdp" in find_pass(spec.name).contract.needs:
                    raise WorkbenchError(
                        f"pass {spec.name!r} needs FSDP, and no parameter of the compiled module is a "
                        "DTensor: shard them, as author_module does, or drop the pass"
                    )
        return GraphFacts("joint", groups, sizes, world_kind() or "one process")

    def _report_idle(self, records: list[PassRecord]) -> None:
        idle = [
            (name, why) for name, why in each_no_effect(records) if name not in self.may_be_idle
        ]
        if self.strict and idle:
            raise WorkbenchError(
                "these passes had no effect: " + "; ".join(f"{name}: {why}" for name, why in idle)
            )
        for name, why in idle:
            warnings.warn(f"pass {name!r} had no effect: {why}", stacklevel=2)

    def table(self) -> str:
        """The verdicts as text: a row for each pass, a column for each check, and the reasons below."""
        if not self.graphs:
            return f"{self!r}: call the compiled module first"
        lines = [repr(self)]
        for graph in self.graphs:
            found = [(r.name, r.verdicts) for r in graph.records]
            checks = columns(v for _, verdicts in found for v in verdicts)
            rows = [(name, outcomes(verdicts, checks)) for name, verdicts in found]
            lines += ["", *(grid(checks, rows) if rows else ["no passes"])]
            lines += [
                f"  {name}: {v.check}: {said(v)}"
                for name, verdicts in found
                for v in verdicts
                if said(v)
            ]
            lines += [
                f"  {r.name}: {text}" for r in graph.records for text in memory_changes(r.memory)
            ]
            lines.append(f"  all ranks: {graph.schedule}")
        every = [record.verdicts for record in self.records]
        missing = unchecked(every, [graph.schedule for graph in self.graphs], NOT_RUN)
        return "\n".join([*lines, "", *(f"not checked: {', '.join(checks)}: {why}" for why, checks in missing.items())])

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
    pipeline: Recipe | Sequence[Spec], *, authored: Authored | None = None, strict: bool = False
) -> Backend:
    """A backend for `torch.compile` that runs these passes, with verdicts on each.

        backend = as_backend(["activation_checkpointing", "graph_cleanup"])
        step = torch.compile(module, backend=backend)
        step(x).sum().backward()
        print(backend.table())

    pipeline: a recipe, for its two lists of passes, or one list in order: names, or tables with options. Joint passes
    run on the joint graph, the others on forward and backward, at the first call. authored: the module's `Authored`,
    for passes that need its blocks; process groups of other modules are read from their DTensors. strict: a pass
    without effect is an error instead of a warning. Every rank must compile at the same call, since the ranks then
    compare their collectives.

    Raises WorkbenchError for a list that breaks a rule, and for a pass that cannot work under torch.compile.
    """
    idle: Sequence[str] = ()
    free_order = False
    if isinstance(pipeline, Recipe):
        specs, free_order = [*pipeline.joint_passes, *pipeline.passes], pipeline.free_order
        strict, idle = strict or pipeline.strict, pipeline.expect.no_effect
    else:
        specs = [PassSpec.model_validate(spec) for spec in listed(pipeline, "as_backend")]
    for spec in specs:
        contract = choose(spec, tuple(Stage), "as_backend")[0].contract
        if contract.stage is Stage.REPLAY:
            raise WorkbenchError(
                f"pass {spec.name!r} cannot run under torch.compile, which may compile again and drop "
                "the graphs that it recorded: drop the pass, or build a recipe with it"
            )
        if contract.stage is Stage.STEP:
            raise WorkbenchError(
                f"pass {spec.name!r} runs on the whole step, and torch.compile hands over a forward "
                'and a backward: drop the pass, or build a recipe with training.step "whole"'
            )
        if "compiler" in contract.needs:
            require_compiler()
    joint = [spec for spec in specs if find_pass(spec.name).contract.stage is Stage.JOINT]
    later = [spec for spec in specs if spec not in joint]
    if specs != [*joint, *later]:
        late = next(spec.name for spec in joint if specs.index(spec) > specs.index(later[0]))
        raise WorkbenchError(
            f"pass {late!r} runs on the joint graph, before {later[0].name!r}: list it earlier"
        )
    if problems := check_passes(
        [s.name for s in joint], [s.name for s in later], free_order=free_order
    ):
        raise WorkbenchError("; ".join(problems))
    return Backend(joint, later, authored, strict, idle)
