"""The step that runs an artifact's code on this rank: nothing is captured, and nothing is compiled."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from workbench.authoring.author import Authored
from workbench.graph.capture import title
from workbench.graph.fixed import Fixed
from workbench.graph.lower import CompiledStep, PairFunction
from workbench.graph.partition import ForwardBackward
from workbench.graph.step_graph import StepGraph
from workbench.graph.update import Update
from workbench.graph.whole_step import WholeStep
from workbench.pipeline.train import optimizer_of
from workbench.tools.export.artifact import KERNELS, Manifest, read_code
from workbench.tools.export.code import Code
from workbench.tools.export.groups import find_groups
from workbench.torch_api.inductor.written_code import install_kernels
from workbench.torch_api.unchanged import shard_of


def load_step(authored: Authored, folder: Path, manifest: Manifest) -> CompiledStep | WholeStep:
    """The step of this rank. Every rank calls it. `manifest` is of `folder`, which `read` has checked.

    Runs the artifact's code as Python: only load what you would run.
    """
    program = manifest.programs[manifest.ranks[authored.world.rank]]
    find_groups(program["groups"], authored)
    install_kernels(folder / KERNELS)
    parts = [_Part(read_code(folder, name), folder / "code" / f"{name}.py") for name in program["files"].values()]
    step, whole = program["step"], program["step"].get("whole")
    fixed, slots = Fixed(authored.module, step["read"]), tuple(parts) * (3 - len(parts))
    run: Any = _function(authored, step, parts) if whole is None else None
    pair = ForwardBackward(slots, authored, step["parameters"], step["buffers"], run, fixed,  # type: ignore[arg-type]
                           parts[0].code.written)
    if whole is None:
        return CompiledStep(pair)
    update = Update(**whole["update"] | {"betas": tuple(whole["update"]["betas"])})
    joined = StepGraph(pair, parts[0].graph, tuple(whole["trained"]), (), {}, update, whole["microbatches"],
                       body=parts[0].body)
    return WholeStep(joined, optimizer_of(authored))


@dataclass
class _Part:
    """One graph's code, as a slot of a pair: `graph` has the inputs alone."""

    code: Code
    file: Path
    graph: GraphModule = field(init=False)
    body: Callable[[list[Any]], Sequence[Any]] = field(init=False)

    def __post_init__(self) -> None:
        module = types.ModuleType(f"workbench_artifact_{self.file.stem}")
        module.__file__ = str(self.file)
        exec(compile(self.code.source, str(self.file), "exec"), vars(module))  # an import would write bytecode there
        self.graph, self.body = self.code.skeleton(), self.code.function(module)


def _function(authored: Authored, step: dict[str, Any], parts: Sequence[_Part]) -> PairFunction:
    forward, backward = (part.code for part in parts)
    names = [*step["parameters"], *step["buffers"]]

    def inputs(given: Sequence[Any]) -> list[Any]:
        held, batch = dict(zip(names, given, strict=False)), iter(given[len(names):])
        return [next(batch) if each.of is None else shard_of(held[each.of]) if each.dtype else held[each.of].device_mesh
                for each in forward.inputs]

    return PairFunction(title(authored), [part.body for part in parts], names, forward.written, step["saved_order"],
                        [of or None for _, of in backward.outputs], inputs)
