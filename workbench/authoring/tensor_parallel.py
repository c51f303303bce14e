"""Tensor and sequence parallelism from a plan that is data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
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


def read_placement(text: str | None, where: str) -> Placement | None:
    """ "replicate", "partial" or "shard(dim)" as a placement; None stays None. `where` names it in the error."""
    if text is None:
        return None
    if text in ("replicate", "partial"):
        return Replicate() if text == "replicate" else Partial()
    if found := _SHARD.fullmatch(text):
        return Shard(int(found[1]))
    raise AuthoringError(
        f'{where}: placement {text!r} is not "replicate", "partial" or "shard(dim)"'
    )


def _layouts(value: Any, where: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(read_placement(item, where) for item in value)
    return read_placement(value, where)


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


def read_style(spec: str | Mapping[str, Any], where: str) -> ParallelStyle:
    """A style's name, or a table {style = name, input, output, wanted, dim, local}, as torch's style object.

    input, output: the placements that arrive and leave; wanted: those to redistribute to; local: hand plain tensors
    on. AuthoringError names `where` for an unknown style or key.
    """
    table = {"style": spec} if isinstance(spec, str) else dict(spec)
    name = table.pop("style", None)
    if name not in STYLES:
        raise AuthoringError(f"{where}: unknown style {name!r}; styles are {', '.join(STYLES)}")
    style, arguments = STYLES[name]
    for key in table.keys() - arguments.keys():
        raise AuthoringError(
            f"{where}: style {name!r} has no key {key!r}; keys are {', '.join(arguments) or 'none'}"
        )
    layouts = ("input", "output", "wanted")
    return style(**{arguments[key]: _layouts(value, where) if key in layouts else value
                    for key, value in table.items()})


def apply_tensor_plan(module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> nn.Module:
    """Turn the parameters that `plan.tensor` names into DTensors on the 1-D `mesh`, and hook inputs and outputs.

    On a module on the meta device this sends nothing. AuthoringError for a pattern that matches no module.
    """
    paths = [path for path, _ in module.named_modules()]
    for pattern, spec in plan.tensor.items():
        for path in matched(pattern, paths, "tensor"):
            part = module.get_submodule(path)
            _check_even(path, part, spec, mesh.size())
            parallelize_module(part, mesh, read_style(spec, f"plan: tensor {pattern!r}"))
    return module


def _check_even(path: str, part: nn.Module, spec: str | Mapping[str, Any], tp: int) -> None:
    """AuthoringError where a linear layer's local input or output would have different sizes on the ranks."""
    table = {"style": spec} if isinstance(spec, str) else spec
    if not isinstance(part, nn.Linear):
        return
    cut = {"colwise": "out_features", "rowwise": "in_features"}.get(table["style"])
    if cut is None or (cut == "out_features" and table.get("output") == "replicate"):
        return  # gathered at once, which DTensor can do for uneven parts
    size = getattr(part, cut)
    if size % tp:
        raise AuthoringError(
            f"mesh.tp {tp} does not divide {path}.{cut} {size}: {size} / {tp} leaves {size % tp}"
        )
