"""Tensor and sequence parallelism from a plan that is data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from workbench.authoring.plans import AuthoringError, ParallelPlan, matched

_SHARD = re.compile(r"shard\((-?\d+)\)")


def _placements(value: Any, where: str) -> Any:
    """ "replicate", "partial" or "shard(dim)", or a list of them, as placements; None stays. `where`: for the error."""
    if isinstance(value, list | tuple):
        return tuple(_placements(item, where) for item in value)
    if value is None:
        return None
    if value in ("replicate", "partial"):
        return Replicate() if value == "replicate" else Partial()
    if shard := _SHARD.fullmatch(value):
        return Shard(int(shard[1]))
    raise AuthoringError(
        f'{where}: placement {value!r} is not "replicate", "partial" or "shard(dim)"'
    )


class _Vocabulary(ParallelStyle):
    """Gives a loss the mesh over which its logits are cut: see `models.loss.CrossEntropy`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.mesh = device_mesh  # type: ignore[assignment]
        return module


class _Everywhere(ParallelStyle):
    """Gathers a module's output, which is cut on `dim`, for readers that differ from rank to rank."""

    def __init__(self, *, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            part = DTensor.from_local(output, device_mesh, [Shard(self.dim)], run_check=False)
            # each rank's heads contribute a part of the gradient
            return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        module.register_forward_hook(whole)
        return module


_LAYOUTS = {"input": "input_layouts", "output": "output_layouts", "local": "use_local_output"}
STYLES: dict[str, tuple[Callable[..., ParallelStyle], dict[str, str]]] = {
    "colwise": (ColwiseParallel, _LAYOUTS),
    "rowwise": (RowwiseParallel, _LAYOUTS),
    "sequence": (SequenceParallel, {"dim": "sequence_dim", "local": "use_local_output"}),
    "inputs": (PrepareModuleInput, {"input": "input_layouts", "wanted": "desired_input_layouts",
                                    "local": "use_local_output"}),
    "outputs": (PrepareModuleOutput, {"output": "output_layouts", "wanted": "desired_output_layouts",
                                      "local": "use_local_output"}),
    "vocabulary": (_Vocabulary, {}),
    "everywhere": (_Everywhere, {"dim": "dim"}),
}
"""torch's class of each style, and its argument for each key of the plan."""


def _style(spec: Mapping[str, Any], where: str) -> ParallelStyle:
    """A table {style, input, output, wanted, dim, local} as torch's style object.

    input, output: the placements that arrive and leave; wanted: those to redistribute to; local: hand plain tensors
    on. AuthoringError names `where` for an unknown style or key.
    """
    table = dict(spec)
    name = table.pop("style", None)
    if name not in STYLES:
        raise AuthoringError(f"{where}: unknown style {name!r}; styles are {', '.join(STYLES)}")
    style, arguments = STYLES[name]
    for key in table.keys() - arguments.keys():
        raise AuthoringError(
            f"{where}: style {name!r} has no key {key!r}; keys are {', '.join(arguments) or 'none'}"
        )
    for key in table.keys() & {"input", "output", "wanted"}:
        table[key] = _placements(table[key], where)
    return style(**{arguments[key]: value for key, value in table.items()})


def apply_tensor_plan(module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> nn.Module:
    """Turn the parameters that `plan.tensor` names into DTensors on the 1-D `mesh`, and hook inputs and outputs.

    On a module on the meta device this sends nothing. AuthoringError for a pattern that matches no module.
    """
    paths = [path for path, _ in module.named_modules()]
    for pattern, spec in plan.tensor.items():
        table = {"style": spec} if isinstance(spec, str) else spec
        for path in matched(pattern, paths, "tensor"):
            part = module.get_submodule(path)
            _check_even(path, part, table, mesh.size())
            parallelize_module(part, mesh, _style(table, f"plan: tensor {pattern!r}"))
    return module


def _check_even(path: str, part: nn.Module, table: Mapping[str, Any], tp: int) -> None:
    """AuthoringError where a linear layer's local input or output would have different sizes on the ranks."""
    cut = {"colwise": "out_features", "rowwise": "in_features"}.get(table.get("style", ""))
    if cut is None or not isinstance(part, nn.Linear):
        return
    if cut == "out_features" and table.get("output") == "replicate":
        return  # gathered at once, which DTensor can do for uneven parts
    size = getattr(part, cut)
    if size % tp:
        raise AuthoringError(
            f"mesh.tp {tp} does not divide {path}.{cut} {size}: {size} / {tp} leaves {size % tp}"
        )
