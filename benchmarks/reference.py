"""torchtitan's compiler toolkit as it is, for a step of the same llama3: its model, its parallelisation, its passes.

Needs torchtitan 0.2.2 (the extra `reference`). What it imports for data and command lines is not used here, and is
replaced by empty modules where it is missing.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from workbench.parallel.materialise import default_initialise, seed_of
from workbench.recipe import Recipe
from workbench.world.mesh import World

UNUSED = ("tyro", "datasets", "datasets.distributed", "torchdata", "torchdata.stateful_dataloader")
RECIPES: dict[str, tuple[list[str], list[str]]] = {  # (joint passes, passes), by its own names
    "reference": ([], []),
    "reference_block_bucketing": ([], ["transformer_block_bucketing"]),
    "reference_full_inductor": (["inductor_decomposition"], ["full_inductor_compilation"]),
    "reference_cudagraph": ([], ["cudagraph"]),
    "reference_block_bucketing_cudagraph": ([], ["transformer_block_bucketing", "cudagraph"]),
}


class _Anything:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {}) if name[0].isupper() else _Anything()


def _fill_in() -> None:
    missing = [n for n in UNUSED if n not in sys.modules and importlib.util.find_spec(n.partition(".")[0]) is None]
    for name in missing:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        sys.modules[name] = module


def toolkit(recipe: Recipe, world: World, variant: str) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """The module with its parameters, and (tokens, targets) -> mean cross entropy; from our initial values."""
    _fill_in()
    from torch.distributed.tensor.parallel import loss_parallel
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.experiments.compiler_toolkit.llama3.parallelize import parallelize_llama
    from torchtitan.experiments.simple_fsdp.llama3.model import SimpleFSDPTransformer
    from torchtitan.experiments.simple_fsdp.simple_fsdp import disable_active_parametrization
    from torchtitan.models.llama3 import TransformerModelArgs

    sizes, mesh = recipe.model.sizes(), recipe.mesh
    args = TransformerModelArgs(
        dim=sizes["dim"], n_layers=sizes["n_layers"], n_heads=sizes["n_heads"], n_kv_heads=sizes["n_kv_heads"],
        vocab_size=sizes["vocab_size"], norm_eps=sizes["norm_eps"], rope_theta=sizes["rope_theta"],
        max_seq_len=recipe.data.seq_len, multiple_of=1,
        # it makes its own width of this; half a unit more keeps the truncation at ours
        ffn_dim_multiplier=(sizes["ffn_dim"] + 0.5) / int(2 * 4 * sizes["dim"] / 3),
    )
    joint_passes, passes = RECIPES[variant]
    config = JobConfig()
    config.compile.enable = True
    config.compile.joint_passes, config.compile.passes = joint_passes, passes
    config.training.seq_len = recipe.data.seq_len
    config.training.mixed_precision_param = recipe.precision.param
    config.training.mixed_precision_reduce = recipe.precision.reduce
    config.activation_checkpoint.mode = "none"
    config.parallelism.fsdp_reshard_after_forward = "default"
    dims = ParallelDims(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=1, tp=mesh.tp, pp=1, ep=1, etp=1,
                        world_size=dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = SimpleFSDPTransformer(args)
    module = parallelize_llama(model, dims, config)
    module.to_empty(device=world.device)
    with torch.no_grad():
        module.init_weights(buffer_device=world.device)
        with disable_active_parametrization():
            for name, parameter in module.inner.named_parameters():
                _ours(name.replace("parametrizations.", "").replace(".original", ""), parameter, recipe, world)
    loss_of = build_cross_entropy_loss(config)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return loss_of(module(tokens), targets) / targets.numel()

    return module, step


def close(module: torch.nn.Module) -> None:
    """Drop its CUDA graphs before NCCL's groups, as its own trainer does."""
    module.joint_graph_module = None  # type: ignore[assignment]
    gc.collect()


def _ours(name: str, parameter: torch.nn.Parameter, recipe: Recipe, world: World) -> None:
    """The values that every variant starts from."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=world.device)
    default_initialise(name, whole, torch.Generator(world.device).manual_seed(seed_of(recipe.training.seed, name)))
    if isinstance(parameter, DTensor):
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
    else:
        parameter.copy_(whole)
