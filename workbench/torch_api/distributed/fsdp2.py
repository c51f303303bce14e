"""What FSDP2 knows of a module under `fully_shard`, and its hooks and classes taken away.

Source: torch/distributed/fsdp/_fully_shard (`FSDPState`, `FSDPParamGroup`, `FSDPParam`), 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import frexp
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


class FSDPParameter:
    """A parameter under `fully_shard`. owners: the modules and attributes that hold it, several where it is tied.

    name: in the model. tp: the spec of the DTensor that `parallelize_module` made of the parameter before, or None.
    meshes: FSDP2's, of one or two axes, and that of tp. dtype: of the gathered parameter; reduce: of its gradient's
    reductions.
    """

    def __init__(self, private: Any, group: Any, paths: dict[nn.Module, str]) -> None:
        info, policy = private._module_info, private.mp_policy
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.owners: list[tuple[nn.Module, str]] = [(info.module, info.param_name), *shared]
        self.name = f"{paths[info.module]}.{info.param_name}".lstrip(".")
        self.private, self.group = private, group
        self.shard, self.meshes = private.sharded_param, [private.mesh_info.mesh]
        self.tp = getattr(private, "_unsharded_dtensor_spec", getattr(private, "_tp_spec", None))
        if self.tp is not None:
            self.meshes.append(self.tp.mesh)
        stored = self.shard.dtype
        self.dtype = policy.param_dtype or stored if stored.is_floating_point else stored
        self.reduce = policy.reduce_dtype or self.dtype

    @property
    def layout(self) -> dict[str, Any]:
        """What a `Gather` of it needs to know."""
        part = self.private._orig_size, tuple(self.private._contiguous_orig_stride)
        layout = {"part": part, "whole": part, "tp_mesh": None, "tp_placements": ()}
        if self.tp is not None:
            layout["whole"] = self.tp.shape, self.tp.stride
            layout["tp_mesh"], layout["tp_placements"] = self.tp.mesh, self.tp.placements
        mesh = self.meshes[0]
        return layout | {
            "shard_mesh": self.private.shard_mesh,
            "replicate_mesh": mesh[mesh.mesh_dim_names[0]] if mesh.ndim > 1 else None,
            "shard_dim": self.private.fsdp_placement.dim,
            "factor": 1 / self.divisor if self.divisor else None,
        }

    @property
    def divisor(self) -> float | None:
        """Of a sum of gradients; None for their average over the data-parallel ranks."""
        divisor, ranks = self.group.gradient_divide_factor, self.meshes[0].size()
        summed = self.group.force_sum_reduction_for_comms or self.reduce not in (torch.float32, torch.bfloat16)
        return divisor or ranks if summed or divisor else None

    def obstacles(self) -> Iterator[str]:
        """What a capture would not reproduce of it."""
        private, local = self.private, self.shard._local_tensor
        if local.is_meta:
            yield "is on the meta device: give it values before, with to_empty and your initialisation"
        if private.offload_to_cpu:
            yield "is offloaded to the CPU: leave out CPUOffloadPolicy"
        if hasattr(local, "fsdp_pre_all_gather"):
            yield f"is a {type(local).__name__}, whose fsdp_pre_all_gather changes what is gathered: leave it out"
        if private.mesh_info.shard_mesh_dim is None:
            yield "is under replicate, and adopt takes what is under fully_shard"
        if getattr(private.mesh_info, "is_spmd_mesh", False):
            yield "is on a mesh of all axes: call fully_shard with the data-parallel ones, without dp_mesh_dims"
        grad = getattr(getattr(private, "_unsharded_param", None), "grad", private.unsharded_accumulated_grad)
        if grad is not None:
            yield "has a gradient that is not reduced yet: call adopt between two steps"
        if self.divisor and frexp(self.divisor)[0] != 0.5:  # exact wherever it is done
            yield f"has a gradient divided by {self.divisor:g}: give set_gradient_divide_factor a power of two"


class FSDPUnit:
    """One call of `fully_shard`. paths: of its modules. outer: the unit around all others, or itself."""

    def __init__(self, state: Any, outer: Self | None, paths: dict[nn.Module, str]) -> None:
        self.outer: Self = outer or self
        self.policy, self.device = state._mp_policy, state._device
        self.state, self.modules = state, state._modules
        self.paths = [paths[module] for module in state._modules]
        groups = getattr(state, "_fsdp_param_groups", None)
        self.groups = list(filter(None, [state._fsdp_param_group])) if groups is None else groups
        self.parameters = [FSDPParameter(p, group, paths) for group in self.groups for p in group.fsdp_params]
        # by default an outer unit keeps what it has gathered
        kept = self.outer is self and state._auto_reshard_after_forward
        self.reshard = not kept and any(group.post_forward_mesh_info for group in self.groups)

    @classmethod
    def all_of(cls, model: nn.Module) -> list[Self]:
        """The units of a model, in the order of `named_modules`."""
        paths = {module: path for path, module in model.named_modules()}
        units: dict[Any, Self] = {}
        outer: dict[nn.Module, Self] = {}
        for module in paths:
            state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
            if state is None or state in units:
                continue
            unit = units[state] = cls(state, outer.get(module), paths)
            for top in unit.modules:
                outer |= dict.fromkeys(top.modules(), unit.outer)
        return list(units.values())

    def obstacles(self) -> Iterator[str]:
        """What a capture would not reproduce of it, in a sentence each."""
        for group in self.groups:
            if not (group.reduce_grads and group.all_reduce_grads):
                yield "gradients are not synchronised: call set_requires_gradient_sync(True) before"
            if getattr(group, "reduce_scatter_unused_params", False):
                yield "unused parameters get zero gradients: leave out set_reduce_scatter_unused_params"
            if group._all_reduce_hook or not type(group._reduce_scatter_comm).__module__.startswith("torch."):
                where = self.paths[0] or "the model"
                yield f"{where} communicates in its own way: leave out set_all_reduce_hook and the like"
        for parameter in self.parameters:
            yield from (f"parameter {parameter.name} {problem}" for problem in parameter.obstacles())

    def release(self) -> None:
        """Reshard, remove FSDP2's hooks, and give the modules their classes back."""
        self.state._pre_forward_hook_handle.remove()
        self.state._post_forward_hook_handle.remove()
        for group in self.groups:
            group.wait_for_unshard()
            group._to_sharded()
            for private in group.fsdp_params:
                private._post_load_hook_handle.remove()
        for module in self.modules:
            module.__class__ = type(module).__bases__[-1]
            for part in module.modules():
                # Dynamo would not guard the attributes of such a module
                part.__dict__.pop("_is_fsdp_managed_module", None)
