"""Turns a recipe, or any module and a plan, into a model on a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.authoring.authored import Authored
from workbench.authoring.families import find_family
from workbench.authoring.layout import Layout, Stored
from workbench.authoring.materialise import (
    Initialise,
    default_initialise,
    fill_buffers,
    seed_of,
    stored_parameter,
    whole_parameter,
)
from workbench.authoring.plans import AuthoringError, ParallelPlan, expand_units, matching
from workbench.authoring.shardable import require_shardable
from workbench.authoring.simple_fsdp import Gather, Precision, parametrise, strided
from workbench.authoring.tensor_parallel import apply_tensor_plan
from workbench.errors import no_exit
from workbench.recipe.hooks import hook
from workbench.torch_api.distributed.simulated import make_per_rank
from workbench.world.mesh import World, axis_sizes, coordinates, group_names

if TYPE_CHECKING:
    from workbench.recipe.recipe import Recipe


@no_exit()
def author_module(
    module: nn.Module,
    world: World,
    mesh: DeviceMesh | None,
    plan: ParallelPlan | None = None,
    *,
    precision: Precision | None = None,
    seed: int = 0,
    initialise: Initialise = default_initialise,
    batch: Callable[[], tuple[Any, ...]] | None = None,
    expert_mesh: DeviceMesh | None = None,
    weights: Mapping[str, Stored | torch.Tensor] | None = None,
) -> Authored:
    """Put any module on `mesh`: tensor parallelism by `plan`, then FSDP on every parameter. Changes `module`.

    A module with values (the same on every rank) keeps them. For a module built under `torch.device("meta")`, each
    parameter is initialised from (seed, name), so that every mesh starts from the same model, and buffers by a method
    `reset_buffers(device)`. The axes of `mesh` decide: dp_shard shards (as `fully_shard`), dp_replicate averages
    gradients (as `replicate`), both together are hybrid sharding, tp applies the plan. `expert_mesh`, with axes
    dp_replicate, ep and ep_shard, holds the modules of `plan.experts`: see `World.expert_mesh`. weights: values of
    parameters and buffers by name, which each rank reads its part of. AuthoringError where plan, mesh and module
    do not fit.

    A compiled step of it compares its arguments with those of the capture (`graph/input_check.py`), and does not read
    attributes or globals again; `numerics` at level full compares two steps with eager.
    """
    plan, precision = plan or ParallelPlan(), precision or Precision()
    axes = axis_sizes(mesh)
    if unknown := set(axes) - {"dp_replicate", "dp_shard", "tp"}:
        raise AuthoringError(
            f"mesh axis {sorted(unknown)[0]!r} is unknown; axes are dp_replicate, dp_shard, tp"
        )
    require_shardable(module, precision)
    buckets = expand_units(plan, [path for path, _ in module.named_modules()])
    named = (*module.named_parameters(), *module.named_buffers(remove_duplicate=False))
    values: dict[str, Stored | torch.Tensor] = {
        name: t.detach() for name, t in named if not t.is_meta
    }
    values |= weights or {}
    first: dict[int, str] = {}
    owners = {  # a parameter that several modules share is known by its first name
        name: first.setdefault(id(param), name)
        for name, param in module.named_parameters(remove_duplicate=False)
    }
    module.to("meta")
    plain = _copy_of(module, precision, owners)
    experts = _expert_modules(module, plan, expert_mesh)
    if mesh is not None and "tp" in axes:
        apply_tensor_plan(module, plan, mesh["tp"])
    stored: dict[str, tuple[nn.Parameter, Layout]] = {}
    factor = 1.0 / (axes.get("dp_replicate", 1) * axes.get("dp_shard", 1))
    for path, part in module.named_modules():
        gathers: dict[str, Gather] = {}
        part_mesh = expert_mesh if path in experts else mesh
        submesh = (
            {axis: part_mesh[axis] for axis in axis_sizes(part_mesh)}
            if part_mesh is not None
            else {}
        )
        for name, param in part.named_parameters(recurse=False):
            full = f"{path}.{name}".lstrip(".")
            owner, floating = owners[full], param.dtype.is_floating_point
            dtype = precision.stored if floating else param.dtype
            if path in experts and expert_mesh is not None:
                layout = Layout.of_experts(owner, param, expert_mesh)
            else:
                layout = Layout.of(owner, param, mesh)
            _require_cut(full, layout, world)
            if owner not in stored:
                whole = partial(
                    whole_parameter, layout, dtype, world.device, seed, initialise, values
                )
                stored[owner] = stored_parameter(layout, world, part_mesh, dtype, whole), layout
                stored[owner][0].requires_grad_(param.requires_grad)
            part._parameters[name], theirs = stored[owner]
            if theirs != layout:
                raise AuthoringError(
                    f"parameter {full} is {owner} under another name, and the plan cuts them differently "
                    f"(dim {layout.cut_dim} here, dim {theirs.cut_dim} there): give both the same style"
                )
            gathers[name] = Gather(
                part=strided(
                    layout.local_shape(coordinates(part_mesh, world.rank), layout.cut_axis)
                ),
                whole=strided(layout.shape),
                replicate_mesh=submesh.get("dp_replicate"),
                shard_mesh=submesh.get(layout.shard_axis),
                tp_mesh=submesh.get("tp") if layout.tensor_parallel else None,
                tp_placements=layout.placements()[-1:],
                precision=precision if floating else Precision(param.dtype, param.dtype),
                shard_dim=layout.shard_dim,
                factor=factor if path in experts else None,
            )
        if gathers and (axes or precision.stored != precision.param):
            parametrise(part, gathers)
    fill_buffers(module, world, values)
    groups = group_names(mesh)
    for axis, group in group_names(expert_mesh).items():
        groups[f"{axis}.experts" if axis in groups else axis] = group
    return Authored(
        module, world, mesh, buckets, groups, batch=batch, expert_mesh=expert_mesh, plain=plain
    )


def _copy_of(module: nn.Module, precision: Precision, owners: Mapping[str, str]) -> nn.Module | None:
    """A copy on the meta device, whose parameters have the dtype of the computation; owners: first name of each."""
    try:
        copied = copy.deepcopy(module).to(precision.param)
    except Exception:  # an attribute of any type may refuse to be copied
        return None
    for name, owner in owners.items():  # parameters that modules share went to the meta device one by one
        path, _, attribute = name.rpartition(".")
        copied.get_submodule(path)._parameters[attribute] = copied.get_parameter(owner)
    return copied


def _expert_modules(module: nn.Module, plan: ParallelPlan, mesh: DeviceMesh | None) -> set[str]:
    """Paths of the modules that stack experts; each gets its expert-parallel axis as `mesh`."""
    if mesh is None:
        return set()
    paths = [path for path, _ in module.named_modules()]
    matches = {path for pattern in plan.experts for path in matching(pattern, paths)}
    if not matches:
        raise AuthoringError(f"there is an expert mesh, and no module of the model stacks experts: "
                             f"plan.experts is {list(plan.experts)}")
    if "ep" in axis_sizes(mesh):
        for path in matches:
            module.get_submodule(path).mesh = mesh["ep"]  # type: ignore[assignment]
    return matches


def _require_cut(name: str, layout: Layout, world: World) -> None:
    """AuthoringError for a parameter that the mesh, or a simulated world, cannot cut."""
    cut, parts = layout.cut_dim, layout.sizes.get(layout.cut_axis, 1)
    if world.kind == "simulated" and cut is not None and layout.shape[cut] % parts:
        raise AuthoringError(
            f"a simulated world cannot cut dim {cut} of {name}, size {layout.shape[cut]}, "
            f"into {parts} unequal parts: choose a tp that divides it, or run on gloo ranks"
        )
    if layout.sharded and not layout.shape:
        raise AuthoringError(
            f"parameter {name} has no dim that dp_shard could cut: give it the shape (1,)"
        )


@no_exit()
def author(recipe: Recipe, world: World, *, plan: ParallelPlan | None = None) -> Authored:
    """Build the recipe's model on the recipe's mesh. World and mesh must have as many ranks.

    `plan` replaces the plan of the model family.

    AuthoringError, with the numbers, where the mesh does not fit the model (the recipe already refuses heads and
    sequences that tp does not divide); WorldError where it does not fit the world.
    """
    family, sizes, spec = find_family(recipe.model.family), recipe.model.sizes(), recipe.mesh
    plan = plan or family.plan(sizes, spec.tp)
    mesh = world.mesh(spec)
    with torch.device("meta"):  # a user's family builds its module with values
        module = family.make(recipe)
    precision = Precision(
        getattr(torch, recipe.precision.param), getattr(torch, recipe.precision.reduce)
    )
    weights = None
    if recipe.model.weights is not None:
        weights = hook("weights.read", f"model.weights {recipe.model.weights!r}")(recipe, module)
    authored = author_module(
        module,
        world,
        mesh,
        plan,
        precision=precision,
        seed=recipe.training.seed,
        batch=lambda: random_tokens(
            world,
            mesh,
            sizes["vocab_size"],
            recipe.data.batch_per_rank,
            recipe.data.seq_len,
            recipe.data.seed,
        ),
        expert_mesh=world.expert_mesh(spec) if plan.experts and spec.experts_apart else None,
        weights=weights,
    )
    if weights is not None:
        weights.read()
    return replace(authored, recipe=recipe, deterministic=recipe.training.deterministic)


def random_tokens(
    world: World, mesh: DeviceMesh | None, vocab_size: int, batch: int, seq_len: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (batch, seq_len) int64: different for each data-parallel rank, the same across tp."""

    def draw(rank: int) -> torch.Tensor:
        place = coordinates(mesh, rank)
        name = f"batch {place.get('dp_replicate', 0)} {place.get('dp_shard', 0)}"
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        return torch.randint(vocab_size, (batch, seq_len + 1), generator=generator).to(world.device)

    if world.fake_mode is not None:
        with world.fake_mode:
            both = torch.empty((batch, seq_len + 1), dtype=torch.int64, device=world.device)
    elif world.kind == "simulated":
        both = make_per_rank(draw, range(world.size))
    else:
        both = draw(world.rank)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
