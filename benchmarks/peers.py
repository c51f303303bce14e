"""What a user would take instead: torch's own FSDP2, tensor and expert parallelism, eagerly or with torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from workbench.authoring.families import find_family
from workbench.authoring.materialise import default_initialise, seed_of
from workbench.authoring.models.moe import Experts
from workbench.authoring.tensor_parallel import apply_tensor_plan
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import World


def fsdp2(recipe: Recipe, world: World, *, compiled: bool = False, loss: bool = False, keep: bool = False,
          float8: str = "") -> nn.Module:
    """The recipe's model on its mesh, from the same initial values as ours; `compiled`: each block by torch.compile;
    `loss`: the loss, too. `keep`: gathered weights stay until the backward, as in our recipes without
    `reshard_after_forward`; without it FSDP2 frees those of all units but the root after the forward.
    `float8`: torchao's recipe for the blocks' linear layers, "tensorwise" (gathered in float8) or "rowwise".

    The forward takes this rank's (tokens, targets), int64 (batch, seq_len), and returns the mean cross entropy.
    Experts lie on their own mesh as ours do, and their gradients are summed there and divided by the data-parallel
    ranks, as torchtitan does for them; like there, what is gathered next is named, since reading counts from the
    device keeps FSDP2 from seeing it in time.
    """
    family = find_family(recipe.model.family)
    mesh, plan = whole_mesh(recipe, world), family.plan(recipe.model.sizes(), recipe.mesh.tp)
    assert mesh.mesh_dim_names is not None
    dtype, reduce = (getattr(torch, name) for name in (recipe.precision.param, recipe.precision.reduce))
    with world.device:
        module = family.make(recipe)
        for name, parameter in module.named_parameters():
            generator = torch.Generator(world.device).manual_seed(seed_of(recipe.training.seed, name))
            with torch.no_grad():
                default_initialise(name, parameter, generator)
                parameter.data = parameter.to(torch.promote_types(dtype, torch.float32))
    if float8:
        _in_float8(module, float8)
    if "tp" in mesh.mesh_dim_names:
        apply_tensor_plan(module, plan, mesh["tp"])
    policy = MixedPrecisionPolicy(dtype, reduce, cast_forward_inputs=False)
    apart = plan.experts and recipe.mesh.experts_apart
    if apart:
        _shard_experts(module, recipe, world, policy)
    if compiled:
        for block in module.layers:
            block.compile()
    if loss:
        module.loss.compile()
    axes = tuple(axis for axis in mesh.mesh_dim_names if axis != "tp")
    for unit in (module.tok_embeddings, *module.layers, [module.norm, module.output], module):
        fully_shard(unit, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=False if keep else None)
    if apart:
        _prefetch(module)
    return module


def _in_float8(module: nn.Module, scaling: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = (Float8LinearConfig(enable_fsdp_float8_all_gather=True) if scaling == "tensorwise"
              else Float8LinearConfig.from_recipe_name(scaling))
    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, path: "layers." in path)


def precompute(module: nn.Module) -> None:
    """One all-reduce of all weights' largest magnitudes, behind the optimizer's step, as torchao asks for."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(module)


def whole_mesh(recipe: Recipe, world: World) -> DeviceMesh:
    """The recipe's mesh with dp_shard in it where that is one rank, too: `fully_shard` needs an axis to lie on."""
    sizes = {axis: getattr(recipe.mesh, axis) for axis in ("dp_replicate", "dp_shard", "tp")}
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class _OwnExperts(Experts):
    """Experts whose weights are DTensors on the ep axis, which FSDP2 needs to know of: it computes with its own."""

    def forward(self, rows: torch.Tensor, counts: tuple[torch.Tensor, Sequence[int]] | None = None) -> torch.Tensor:
        own: Any = SimpleNamespace(**{name: weight.to_local() for name, weight in self.named_parameters()})
        return Experts.forward(own, rows, counts)


def _shard_experts(module: nn.Module, recipe: Recipe, world: World, policy: MixedPrecisionPolicy) -> None:
    spec, mesh = recipe.mesh, expert_mesh(recipe, world)
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "ep")
    for experts in [part for part in module.modules() if isinstance(part, Experts)]:
        held = {name: weight.chunk(spec.ep)[mesh["ep"].get_local_rank()] for name, weight in experts.named_parameters()}
        for name, weight in held.items():
            part = DTensor.from_local(weight.detach().clone(), mesh["ep"], [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(part))
        within = int(next(iter(held.values())).shape[0] % mesh["ep_shard"].size() > 0)
        experts.mesh = mesh["ep"] if spec.ep > 1 else None
        experts.__class__ = _OwnExperts
        fully_shard(experts, mesh=mesh[axes], mp_policy=policy, shard_placement_fn=lambda _, at=within: Shard(at))
        experts.set_gradient_divide_factor(spec.dp)
        # gloo cannot scale while it sums; a group of one sums nothing, and would be divided twice
        experts.set_force_sum_reduction_for_comms(world.kind == "gloo" and mesh["ep_shard"].size() > 1)


def expert_mesh(recipe: Recipe, world: World) -> DeviceMesh:
    """The ranks of the recipe's expert mesh with FSDP's axes first; ep and ep_shard are there with one rank too."""
    mesh, sizes = world.expert_mesh(recipe.mesh), recipe.mesh.expert_axes
    assert mesh is not None
    ranks = mesh.mesh.reshape(tuple(sizes.values())).transpose(1, 2)
    names = ("dp_replicate", "ep_shard", "ep")
    skipped = int(sizes["dp_replicate"] == 1)
    return DeviceMesh(world.device.type, ranks[0] if skipped else ranks, mesh_dim_names=names[skipped:])


def _prefetch(module: nn.Module) -> None:
    def units(block: nn.Module) -> list[FSDPModule]:
        return [part for part in block.modules() if isinstance(part, FSDPModule)]

    order = [module.tok_embeddings, *module.layers, module.norm]
    for part, following in pairwise(order):
        part.set_modules_to_forward_prefetch(units(following))
    for part, before in pairwise(order[::-1]):
        part.set_modules_to_backward_prefetch(units(before))
