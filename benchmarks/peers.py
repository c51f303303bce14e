"""What a user would take instead: torch's own FSDP2 and tensor parallelism, eagerly or with torch.compile."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from workbench.models.llama3 import Llama3
from workbench.parallel.author import model_config
from workbench.parallel.materialise import default_initialise, seed_of
from workbench.parallel.plans import llama3_plan
from workbench.parallel.tensor_parallel import apply_tensor_plan
from workbench.recipe import Recipe
from workbench.world.mesh import World


def fsdp2(recipe: Recipe, world: World, *, compiled: bool = False) -> nn.Module:
    """The recipe's llama3 on its mesh, from the same initial values as ours; `compiled`: each block by torch.compile.

    The forward takes this rank's (tokens, targets), int64 (batch, seq_len), and returns the mean cross entropy.
    """
    mesh = world.mesh(recipe.mesh)
    assert mesh is not None and mesh.mesh_dim_names is not None
    with world.device:
        module = Llama3(model_config(recipe))
        for name, parameter in module.named_parameters():
            generator = torch.Generator(world.device).manual_seed(seed_of(recipe.training.seed, name))
            with torch.no_grad():
                default_initialise(name, parameter, generator)
    if "tp" in mesh.mesh_dim_names:
        apply_tensor_plan(module, llama3_plan(recipe.model.sizes(), recipe.mesh.tp), mesh["tp"])
    if compiled:
        for block in module.layers:
            block.compile()
    dtype, reduce = (getattr(torch, name) for name in (recipe.precision.param, recipe.precision.reduce))
    axes = tuple(axis for axis in mesh.mesh_dim_names if axis != "tp")
    policy = MixedPrecisionPolicy(dtype, reduce, cast_forward_inputs=False)
    for unit in (module.tok_embeddings, *module.layers, [module.norm, module.output], module):
        fully_shard(unit, mesh=mesh[axes], mp_policy=policy)
    return module
