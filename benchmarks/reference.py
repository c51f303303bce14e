"""torchtitan's compiler toolkit as it is, for a step of the same model: its module, its parallelisation, its passes.

Needs torchtitan 0.2.2 (the extra `reference`). What it imports for data and command lines is not used here, and is
replaced by empty modules where it is missing.

deepseek_v3: its experts lie as ours do under mesh.ep_over "dp_shard x tp" (its expert tensor parallelism 1). Unlike
ours, it computes router and latents for all tokens on each rank of tp, pads each expert's rows to a multiple of 8, and
counts an expert's tokens over all steps. It has no static capacity. With tp it leaves out a sum: each rank takes its
own tokens' part of the gradient of the router and of what the experts read; without tp all its gradients are ours.
Its inputs must lie on a tp axis: where there is none, that is repaired here.
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

from workbench.authoring.materialise import default_initialise, seed_of
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import World

UNUSED = ("tyro", "tokenizers", "datasets", "datasets.distributed", "torchdata", "torchdata.stateful_dataloader",
          "torch_checkpointing", "torch.utils.tensorboard")
KERNELS = ("torchtitan.models.moe.kernels", "torchtitan.distributed.minimal_async_ep.kernels")  # of 0.2 and of 0.3
RECIPES: dict[str, tuple[list[str], list[str]]] = {  # (joint passes, passes), by its own names
    "reference": ([], []),
    "reference_block_bucketing": ([], ["transformer_block_bucketing"]),
    "reference_full_inductor": (["inductor_decomposition"], ["full_inductor_compilation"]),
    "reference_cudagraph": ([], ["cudagraph"]),
    "reference_block_bucketing_cudagraph": ([], ["transformer_block_bucketing", "cudagraph"]),
    "reference_flex_block_bucketing_regional": ([], ["transformer_block_bucketing", "regional_inductor"]),
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


def fill_in() -> None:
    """Empty modules for what torchtitan imports, is missing here, and is not used; in this process alone."""
    packages = {name: name.removeprefix("torch.utils.").partition(".")[0] for name in UNUSED if name not in sys.modules}
    missing = [name for name, package in packages.items() if importlib.util.find_spec(package) is None]
    for name in missing:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        sys.modules[name] = module
    if importlib.util.find_spec("triton") is None:  # without it the kernels of experts cannot be imported
        for name in KERNELS:
            kernels = types.ModuleType(name)
            kernels.__getattr__ = _attribute  # type: ignore[method-assign]
            sys.modules.setdefault(name, kernels)


def _llama3(recipe: Recipe) -> tuple[Any, Any, Callable[..., Any]]:
    from torchtitan.experiments.compiler_toolkit.llama3.parallelize import parallelize_llama
    from torchtitan.experiments.simple_fsdp.llama3.model import SimpleFSDPTransformer
    from torchtitan.models.llama3 import TransformerModelArgs

    sizes = recipe.model.sizes()
    args = TransformerModelArgs(
        dim=sizes["dim"], n_layers=sizes["n_layers"], n_heads=sizes["n_heads"], n_kv_heads=sizes["n_kv_heads"],
        vocab_size=sizes["vocab_size"], norm_eps=sizes["norm_eps"], rope_theta=sizes["rope_theta"],
        max_seq_len=recipe.data.seq_len, multiple_of=1,
        # it makes its own width of this; half a unit more keeps the truncation at ours
        ffn_dim_multiplier=(sizes["ffn_dim"] + 0.5) / int(2 * 4 * sizes["dim"] / 3),
    )
    return SimpleFSDPTransformer, args, parallelize_llama


def _deepseek_v3(recipe: Recipe) -> tuple[Any, Any, Callable[..., Any]]:
    from torchtitan.experiments.compiler_toolkit.deepseek_v3.parallelize import parallelize_deepseekv3
    from torchtitan.experiments.simple_fsdp.deepseek_v3.model import SimpleFSDPDeepSeekV3Model
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs

    sizes, mesh = recipe.model.sizes(), recipe.mesh
    if sizes["dispatch"] != "dropless":
        raise ValueError("the reference has no static capacity: leave model.dispatch at dropless")
    if mesh.tp > 1 and (mesh.ep == 1 or mesh.ep_over != "dp_shard x tp"):
        raise ValueError('the reference spreads whole experts over dp_shard x tp only: set mesh.ep to 2 or more, and '
                         'mesh.ep_over to "dp_shard x tp"')
    grouped = sizes["n_groups"] > 1
    args = DeepSeekV3ModelArgs(
        vocab_size=sizes["vocab_size"], dim=sizes["dim"], inter_dim=sizes["ffn_dim"],
        moe_inter_dim=sizes["expert_dim"], n_layers=sizes["n_layers"], n_dense_layers=sizes["n_dense_layers"],
        n_heads=sizes["n_heads"], norm_eps=sizes["norm_eps"], q_lora_rank=sizes["q_lora_rank"],
        kv_lora_rank=sizes["kv_lora_rank"], qk_nope_head_dim=sizes["qk_nope_dim"],
        qk_rope_head_dim=sizes["qk_rope_dim"], v_head_dim=sizes["v_dim"], rope_theta=sizes["rope_theta"],
        max_seq_len=recipe.data.seq_len,
        original_seq_len=recipe.data.seq_len,  # no longer than that: no YaRN
        moe_args=MoEArgs(
            num_experts=sizes["n_experts"], num_shared_experts=sizes["n_shared_experts"], top_k=sizes["top_k"],
            score_func=sizes["score"], route_norm=sizes["normalise"], route_scale=sizes["route_scale"],
            score_before_experts=False, num_expert_groups=sizes["n_groups"] if grouped else None,
            num_limited_groups=sizes["top_groups"] if grouped else None,
        ),
    )
    return SimpleFSDPDeepSeekV3Model, args, parallelize_deepseekv3


FAMILIES = {"llama3": _llama3, "deepseek_v3": _deepseek_v3}


def toolkit(recipe: Recipe, world: World, variant: str) -> tuple[torch.nn.Module, Callable[..., torch.Tensor]]:
    """The module with its parameters, and (tokens, targets) -> mean cross entropy; from our initial values.

    Its gradients are summed over the data-parallel ranks.
    """
    fill_in()
    from torch.distributed.tensor.parallel import loss_parallel
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.experiments.simple_fsdp.simple_fsdp import disable_active_parametrization
    from torchtitan.models.attention import create_attention_mask, get_causal_mask_mod

    mesh = recipe.mesh
    joint_passes, passes = RECIPES[variant]
    config = JobConfig()
    config.compile.enable = True
    config.compile.joint_passes, config.compile.passes = joint_passes, passes
    config.training.seq_len = recipe.data.seq_len
    config.training.mixed_precision_param = recipe.precision.param
    config.training.mixed_precision_reduce = recipe.precision.reduce
    config.activation_checkpoint.mode = "none"
    config.parallelism.fsdp_reshard_after_forward = "default"
    dims = _with_fsdp(ParallelDims)(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=1, tp=mesh.tp, pp=1,
                                    ep=mesh.ep, etp=1, world_size=dist.get_world_size())
    dims.build_mesh()
    family, args, parallelize = FAMILIES[recipe.model.family](recipe)
    if "flex" in variant:
        args.attn_type = "flex"
    args.update_from_config(config)
    with torch.device("meta"):
        model = family(args)
    model.norm.eps = recipe.model.sizes()["norm_eps"]
    module = parallelize(model, dims, config)
    if mesh.tp == 1:
        _plain_inputs(module)
    module.to_empty(device=world.device)
    with torch.no_grad():
        module.init_weights(buffer_device=world.device)
        with disable_active_parametrization():
            for name, parameter in module.inner.named_parameters():
                whole = initial_values(name, parameter.shape, recipe, world)
                if isinstance(parameter, DTensor):
                    layout = parameter.device_mesh, parameter.placements
                    whole = distribute_tensor(whole, *layout, src_data_rank=None)
                parameter.copy_(whole)
    loss_of = build_cross_entropy_loss(config)
    seq = recipe.data.seq_len
    masks = {}
    if "flex" in variant:
        masks["attention_masks"] = create_attention_mask(get_causal_mask_mod(), 1, None, seq, seq)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            return loss_of(module(tokens, **masks), targets) / targets.numel()

    return module, step


def _with_fsdp(base: Any) -> Any:
    """torchtitan's mesh with FSDP over an axis of one too: on tp alone it would compute in float32."""

    class Dimensions(base):  # type: ignore[misc]
        dp_shard_enabled = property(lambda self: self.dp_shard > 1 or not self.dp_replicate_enabled)

        def _mesh_exist(self, name: str, degree: int) -> bool:
            return bool(super()._mesh_exist(name, degree) or (name == "fsdp" and self.dp_shard_enabled))

    return Dimensions


def close(module: torch.nn.Module) -> None:
    """Drop its CUDA graphs before NCCL's groups, as its own trainer does."""
    module.joint_graph_module = None  # type: ignore[assignment]
    gc.collect()


def _plain_inputs(module: torch.nn.Module) -> None:
    from torchtitan.experiments.compiler_toolkit import graph_utils

    module.parallelize_inputs = lambda _, args, kwargs: (args, kwargs)
    graph_utils.DTensor = torch.Tensor  # it is what the builder wants its inputs to be, and nothing else


def initial_values(name: str, shape: torch.Size, recipe: Recipe, world: World) -> torch.Tensor:
    """What every variant starts from, of the reference's parameter `name`: ours, in its order of rotary channels."""
    ours = name.replace("wkv_b.", "wkv.").replace("wq_b.", "wq.")
    whole = torch.empty(shape, device=world.device)
    default_initialise(ours, whole, torch.Generator(world.device).manual_seed(seed_of(recipe.training.seed, ours)))
    sizes = recipe.model.sizes()
    if recipe.model.family == "deepseek_v3":
        width = sizes["qk_rope_dim"]
        turned = {"wq.weight": sizes["qk_nope_dim"] + width, "wkv_a.weight": shape[0]}
    else:
        width = sizes["dim"] // sizes["n_heads"]
        turned = {"wq.weight": width, "wk.weight": width}
    channels = turned.get(ours.rpartition("attention.")[2])
    return whole if channels is None else _in_pairs(whole, channels, width)


def _in_pairs(rows: torch.Tensor, channels: int, width: int) -> torch.Tensor:
    """The last `width` of each head's `channels` rows: from (i, i + width / 2) turned together to (2 i, 2 i + 1)."""
    heads = rows.unflatten(0, (-1, channels))
    halves = heads[:, channels - width :].unflatten(1, (2, -1))
    return torch.cat((heads[:, : channels - width], halves.transpose(1, 2).flatten(1, 2)), 1).flatten(0, 1)
