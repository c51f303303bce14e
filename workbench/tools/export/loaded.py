"""The step that runs an artifact's code on this rank: nothing is captured, and nothing is compiled."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from workbench.authoring.author import Authored
from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.fixed import Fixed
from workbench.graph.lower import CompiledStep
from workbench.graph.partition import ForwardBackward
from workbench.graph.step_graph import StepGraph
from workbench.graph.update import Update
from workbench.graph.whole_step import WholeStep
from workbench.pipeline.train import optimizer_of
from workbench.tools.export.artifact import Manifest, read_code
from workbench.tools.export.code import Code
from workbench.tools.export.groups import find_groups
from workbench.torch_api.inductor.written_code import install_kernels
from workbench.torch_api.unchanged import shard_of

KERNELS = "kernels"


def load_step(authored: Authored, folder: Path, manifest: Manifest) -> CompiledStep | WholeStep:
    """The step of this rank. Every rank calls it. `manifest` is of `folder`, which `read` has checked.

    Runs the artifact's code as Python: only load what you would run.
    """
    program = manifest.programs[manifest.ranks[authored.world.rank]]
    find_groups(program["groups"], authored)
    install_kernels(folder / KERNELS)
    parts = [_Part(read_code(folder, name), folder / "code" / f"{name}.py") for name in program["files"].values()]
    step, whole = program["step"], program["step"].get("whole")
    runs = _Pair(authored, step, parts)
    slots: Any = tuple(parts) * (3 - len(parts))
    fixed = Fixed(authored.module, step["read"])
    pair = ForwardBackward(slots, authored, step["parameters"], step["buffers"], runs, fixed)
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
    fw_metadata: None = None

    def __post_init__(self) -> None:
        module = types.ModuleType(f"workbench_artifact_{self.file.stem}")
        module.__file__ = str(self.file)
        exec(compile(self.code.source, str(self.file), "exec"), vars(module))  # an import would write bytecode there
        self.graph, self.body = self.code.skeleton(), self.code.function(module)


class _Pair:
    """What AOTAutograd's wrapper does around forward and backward: locals of DTensors in, gradients as DTensors out.

    Called with the module's parameters and buffers, and then this rank's batch, it returns the loss.
    """

    def __init__(self, authored: Authored, step: dict[str, Any], parts: Sequence[_Part]):
        self.title, self.parts = title(authored), parts
        self.names: list[str] = [*step["parameters"], *step["buffers"]]
        self.saved_order: list[int] = step["saved_order"]

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _Differentiable.apply(self, *given)
        return loss

    def forward(self, given: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The loss, and what the backward takes before the tangent, in its order."""
        code, batch = self.parts[0].code, iter(given[len(self.names):])
        held = dict(zip(self.names, given, strict=False))
        values = self.parts[0].body([
            next(batch) if each.of is None else shard_of(held[each.of]) if each.dtype else held[each.of].device_mesh
            for each in code.inputs])
        by_kind: dict[str, list[Any]] = {"result": [], "saved": []}
        for value, (kind, of) in zip(values, code.outputs, strict=True):
            if kind == "buffer":
                shard_of(held[of]).copy_(value)
            else:
                by_kind[kind].append(value)
        (loss,) = by_kind["result"]
        return loss, [by_kind["saved"][place] for place in self.saved_order]

    def backward(self, saved: list[Any], tangent: torch.Tensor, like: dict[str, Any]) -> list[Any]:
        """For each parameter and buffer its gradient, or None. Empties `saved`."""
        saved.append(tangent)
        values = self.parts[1].body(saved)
        found = {of: value for value, (kind, of) in zip(values, self.parts[1].code.outputs, strict=True)
                 if kind == "gradient"}
        return [_as(found.get(name), like[name]) for name in self.names]


def _as(value: torch.Tensor | None, like: Any) -> torch.Tensor | None:
    """This rank's part of a gradient, as a tensor of the parameter's kind."""
    if value is None or not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value, like.device_mesh, like.placements, run_check=False, shape=like.shape,
                              stride=like.stride())


class _Differentiable(torch.autograd.Function):
    """Saved tensors go from one body to the other as a list, which the backward's body empties as it goes."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, *given: torch.Tensor) -> torch.Tensor:
        loss, ctx.saved = pair.forward(given)
        ctx.pair, ctx.count = pair, len(given)
        ctx.like = dict(zip(pair.names, given, strict=False))
        return loss

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise WorkbenchError(f"the compiled step of {ctx.pair.title}: backward() was called twice on one loss, and "
                                 "what the forward saved is gone: call the step again")
        gradients = ctx.pair.backward(saved, tangent, ctx.like)
        return (None, *gradients, *[None] * (ctx.count - len(gradients)))
