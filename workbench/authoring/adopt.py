"""`adopt`: a model under `fully_shard` becomes ours in place, and keeps parameters, optimizer and state-dict keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
import torch.fx.traceback
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.authoring.authored import Authored
from workbench.authoring.plans import AuthoringError
from workbench.authoring.simple_fsdp import Gather, Precision, parametrise
from workbench.recipe.hooks import hook_of, values_of
from workbench.torch_api.distributed.fsdp2 import FSDPParameter, FSDPUnit
from workbench.torch_api.partitioning import RESHARD
from workbench.torch_api.tree import tree_map
from workbench.world.mesh import AXES, all_gather_object, current_world, group_names

_KEY, UNIT = "_workbench_authored", "_workbench_unit"


def adopt(model: nn.Module) -> nn.Module:
    """Take `model`, a module under `fully_shard`, from FSDP2's hooks, and have reads of its parameters gather them.

    Every rank must call it. The model stays the same object, and so do its parameters, which are DTensors: an optimizer
    that has them goes on. Values are FSDP2's, bit for bit. `torch.compile` and the workbench's capture then see its
    gathers and reductions. Each unit's `reshard_after_forward` decides for the partition what is gathered again; a
    number of ranks to reshard to counts as True.

    AuthoringError, on all ranks and with the model as it was, where any rank has something that would not be
    reproduced. The sentence names it.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise AuthoringError("adopt: a CUDA graph is being recorded: call it before; the model is as it was")
    units = AdoptedUnit.all_of(model)
    problems = all_gather_object(next(_obstacles(model, units), ""))
    for rank, problem in enumerate(problems):
        if problem:
            where = f"rank {rank}: " if len(set(problems)) > 1 else ""
            raise AuthoringError(f"adopt: {where}{problem}; the model is as it was")
    mesh = _mesh(_widest(units))
    authored = Authored(model, current_world(), mesh, list(_buckets(units)), group_names(mesh))
    gathers: dict[nn.Module, dict[str, Gather]] = {}
    for unit in units:
        for parameter in unit.parameters:
            precision = Precision(parameter.dtype, parameter.reduce)
            gather = UnitGather(
                **parameter.layout, precision=precision, unit=unit, name=parameter.name
            )
            for module, name in parameter.owners:
                gathers.setdefault(module, {})[name] = gather
    for unit in units:
        unit.release()
        for module in unit.modules:
            unit.take(module)
        for name in values_of("adopt"):
            hook_of("adopt", name)(unit)
    for module, of_module in gathers.items():
        parametrise(module, of_module)
    model.__dict__[_KEY] = authored
    return model


def adopted(model: nn.Module) -> Authored | None:
    """What `adopt` made of the model: its mesh and groups by our names of the axes, its units as buckets. Or None."""
    return getattr(model, _KEY, None)


class AdoptedUnit(FSDPUnit):
    """wholes: during its forward, what has been gathered. So one gradient comes back, also of a tied parameter.

    Those of a unit of several modules are in the outer unit, whose forward is around them all.
    """

    wholes: dict[Any, torch.Tensor] | None = None

    def cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In the place of FSDP2's hook before the forward."""
        dtype = self.policy.param_dtype if self.policy.cast_forward_inputs else None
        return _cast((args, kwargs), dtype, self.device if self.outer is self else None)

    def cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """In the place of FSDP2's hook after the forward."""
        return _cast(output, self.policy.output_dtype)

    def take(self, module: nn.Module) -> None:
        vars(module)[UNIT] = self
        module.__class__ = _unit_class(type(module))  # type: ignore[assignment, arg-type]
        if self.outer is not self:
            module.register_forward_pre_hook(self.cast_inputs, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.cast_output)


@cache
def _unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Its forward is what torch.compile traces: of the module that it is given, Dynamo leaves hooks outside."""

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = vars(self)[UNIT]
        if len(unit.paths) == 1:
            unit.wholes = {}
        if unit.outer is unit:
            args, kwargs = unit.cast_inputs(self, args, kwargs)
        output = cls.forward(self, *args, **kwargs)
        unit.wholes = None
        return unit.cast_output(self, args, output) if unit.outer is unit else output

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward})


def _cast(values: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    def cast(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device=device, dtype=dtype if x.is_floating_point() else None)

    return values if dtype is None and device is None else tree_map(cast, values)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitGather(Gather):
    """Gathers once in a forward of its unit. name: of the parameter, in the model."""

    unit: AdoptedUnit
    name: str

    def __call__(self, shard: Any) -> torch.Tensor:
        unit = self.unit if len(self.unit.paths) == 1 else self.unit.outer
        wholes = {} if unit.wholes is None else unit.wholes
        key = self.name, torch.is_grad_enabled()
        if key not in wholes:
            with torch.fx.traceback.annotate({RESHARD: self.unit.reshard}):
                wholes[key] = super().__call__(shard)
        return wholes[key]


def _obstacles(model: nn.Module, units: list[AdoptedUnit]) -> Iterator[str]:
    for path, module in model.named_modules():
        where, children = f"module {path}" if path else "the model", module._modules
        if module._compiled_call_impl is not None or "_orig_mod" in children:
            yield f"{where} is compiled on its own: leave that out, and call torch.compile on the model after adopt"
        if "_checkpoint_wrapped_module" in children:
            yield f"{where} is a checkpoint wrapper: leave it out, and list the pass activation_checkpointing"
        if _KEY in vars(module):
            yield f"{where} is adopted already: adopt a model once, and as a whole"
    if not units:
        yield f"no module of {type(model).__name__} is under fully_shard: call that before"
        return
    widest = _widest(units)
    for unit in units:
        yield from unit.obstacles()
        for p in unit.parameters:
            if p.meshes != widest.meshes[: len(p.meshes)] or any(m.ndim > 1 for m in p.meshes[1:]):
                yield (
                    f"parameter {p.name} is on {p.shard.device_mesh}: all need one mesh, of at most dp_replicate and "
                    "dp_shard for fully_shard, and tp for parallelize_module"
                )


def _widest(units: list[AdoptedUnit]) -> FSDPParameter:
    """A parameter that is spread over most axes."""
    every = [parameter for unit in units for parameter in unit.parameters]
    return max(every, key=lambda parameter: len(parameter.meshes))


def _mesh(widest: FSDPParameter) -> DeviceMesh | None:
    """Its process groups under our names of the axes, without axes of one rank."""
    groups = [mesh.get_group(dim) for mesh in widest.meshes for dim in range(mesh.ndim)]
    axes = [*AXES[2 - widest.meshes[0].ndim : 2], "tp"]
    kept = {axis: group for axis, group in zip(axes, groups, strict=False) if group.size() > 1}
    if not kept:
        return None
    whole = widest.shard.device_mesh
    return DeviceMesh.from_group(
        list(kept.values()), whole.device_type, whole.mesh.squeeze(), mesh_dim_names=tuple(kept)
    )


def _buckets(units: list[AdoptedUnit]) -> Iterator[str | list[str]]:
    """The modules of each unit, or those that hold its parameters where other units are inside of it."""
    for unit in units:
        others = [f"{path}." for other in units if other is not unit for path in other.paths]
        bucket: list[str] = []
        for path in (*unit.paths, *sorted(p.name.rpartition(".")[0] for p in unit.parameters)):
            around = not path or any(other.startswith(f"{path}.") for other in others)
            if not around and not any(f"{path}.".startswith(f"{known}.") for known in bucket):
                bucket.append(path)
        if bucket:
            yield bucket if len(bucket) > 1 else bucket[0]
