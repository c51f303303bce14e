"""What `benchmarks/step_time.py` measures: our recipes with their changes, and the peers, by the variants' names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.recipe.recipe import Recipe

COMMON = {"data.seq_len": 2048, "data.batch_per_rank": 4, "precision.param": "bfloat16", "mesh.dp_shard": 2,
          "mesh.tp": 2, "training.deterministic": False}
DEEPSEEK = {"dim": 256, "n_layers": 6, "n_dense_layers": 1, "n_heads": 16, "vocab_size": 2048, "ffn_dim": 1024,
            "expert_dim": 256, "n_experts": 8, "n_shared_experts": 2, "top_k": 3, "n_groups": 1, "top_groups": 1,
            "score": "softmax", "normalise": False, "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_dim": 128,
            "qk_rope_dim": 64, "v_dim": 128, "norm_eps": 1e-5}
MODELS: dict[str, dict[str, Any]] = {
    "llama3": {**COMMON, "model.flavor": "1b"},
    "deepseek_v3": {**COMMON, **{f"model.{name}": size for name, size in DEEPSEEK.items()},
                    "mesh.ep": 2, "mesh.ep_over": "dp_shard x tp"},
}
H200X2 = {"name": "overlap_collectives", "device": "h200x2"}  # by what was measured on two of them
OFFLOAD = {"name": "offload_activations", "device": "h200x2"}
BLOCKS, LOWERED = "transformer_block_bucketing", ["full_inductor_compilation", "cudagraph"]
FLOAT8 = ["inductor_decomposition", "float8_matmul"]
WHOLE_FLOAT8 = {"training.step": "whole", "joint_passes": FLOAT8,
                "passes": [BLOCKS, H200X2, "fused_clip_adamw", *LOWERED]}
OWN: dict[str, tuple[str, dict[str, Any]]] = {  # of which recipe of ours, and what it changes
    "llama3_fsdp": ("llama3_fsdp", {"mesh.dp_shard": 4, "mesh.tp": 1}),
    "llama3_hsdp": ("llama3_hsdp", {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.tp": 1}),
    "llama3_tp": ("llama3_tp", {"mesh.dp_shard": 1, "mesh.tp": 4}),
    "llama3_full_inductor_cudagraph": ("llama3_full_inductor", {"passes": ["full_inductor_compilation", "cudagraph"]}),
    "llama3_calibrated_cudagraph": ("llama3_full_inductor", {"passes": [BLOCKS, H200X2, *LOWERED]}),
    "llama3_whole_step_cudagraph": ("llama3_whole_step", {"passes": [BLOCKS, H200X2, *LOWERED]}),
    "llama3_whole_step_fused_cudagraph": (
        "llama3_whole_step", {"passes": [BLOCKS, H200X2, "fused_clip_adamw", *LOWERED]}),
    "llama3_whole_step_fused": ("llama3_whole_step", {"passes": [BLOCKS, "fused_clip_adamw", LOWERED[0]]}),
    "llama3_float8_cudagraph": ("llama3_float8", {"joint_passes": FLOAT8, "passes": [BLOCKS, H200X2, *LOWERED]}),
    "llama3_float8_whole_step_cudagraph": ("llama3_float8", WHOLE_FLOAT8),
    "llama3_float8_whole_step_gathers_bfloat16": (
        "llama3_float8", {**WHOLE_FLOAT8, "joint_passes.float8_matmul.float8_gathers": False}),
    "llama3_float8_whole_step_all_sizes": (
        "llama3_float8", {**WHOLE_FLOAT8, "joint_passes.float8_matmul.smallest": 16}),
    "llama3_float8_whole_step_rowwise": (
        "llama3_float8", {**WHOLE_FLOAT8, "joint_passes.float8_matmul.scaling": "rowwise"}),
    "llama3_float8_whole_step_two_products": ("llama3_float8", {
        **WHOLE_FLOAT8, "joint_passes.float8_matmul.products": ["forward", "input_gradient"]}),
    "llama3_chunked_loss_cudagraph": ("llama3_chunked_loss", {"passes": [BLOCKS, *LOWERED]}),
    "llama3_whole_step_chunked_loss_cudagraph": ("llama3_chunked_loss", {"passes": [BLOCKS, *LOWERED],
                                                                         "training.step": "whole"}),
    "llama3_offload_hidden": ("llama3_offload", {"passes": [BLOCKS, OFFLOAD, LOWERED[0]]}),
    "llama3_offload_all": ("llama3_offload", {"passes": [BLOCKS, {**OFFLOAD, "choose": "all"}, LOWERED[0]]}),
    "llama3_offload_hidden_cudagraph": ("llama3_offload", {"passes": [BLOCKS, OFFLOAD, *LOWERED]}),
    "llama3_whole_step_offload_cudagraph": ("llama3_whole_step", {"passes": [BLOCKS, OFFLOAD, *LOWERED]}),
    "llama3_tp_calibrated_cudagraph": ("llama3_full_inductor", {"passes": [H200X2, *LOWERED]}),
    "llama3_tp_async_cudagraph": (
        "llama3_full_inductor", {"passes": ["async_tensor_parallel", H200X2, *LOWERED]}),
    "llama3_tp_whole_step_cudagraph": ("llama3_whole_step", {"passes": [H200X2, "fused_clip_adamw", *LOWERED]}),
    "deepseek_v3_capacity": ("deepseek_v3", {"model.dispatch": "capacity"}),
    "deepseek_v3_capacity_cudagraph": ("deepseek_v3", {"model.dispatch": "capacity", "passes": ["cudagraph"]}),
    "deepseek_v3_capacity_block_bucketing_cudagraph": (
        "deepseek_v3", {"model.dispatch": "capacity", "passes": ["transformer_block_bucketing", "cudagraph"]}),
}
BUCKETED = "llama3_full_inductor_block_bucketing_cudagraph"


def joint(*passes: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return BUCKETED, {"joint_passes": ["inductor_decomposition", *passes]}


def budget(gib: float) -> dict[str, Any]:
    return {"name": "memory_budget", "gib": gib, "device": "h200x2"}


OWN |= {f"llama3_budget_{gib}": joint(budget(gib)) for gib in (10.0, 8.5, 7.0, 5.0)}
OWN |= {f"llama3_budget_{gib}_reshard": joint("reshard_after_forward", budget(gib)) for gib in (8.5, 7.0, 5.0, 3.0)}
OWN |= {f"llama3_float8_budget_{gib}": ("llama3_float8", {
    "joint_passes": [*FLOAT8, budget(gib)], "passes": [BLOCKS, H200X2, *LOWERED]}) for gib in (7.0, 5.0)}
OWN |= {f"llama3_float8_whole_step_reshard_budget_{gib}": ("llama3_float8", {
    **WHOLE_FLOAT8, "joint_passes": [*FLOAT8, "reshard_after_forward", budget(gib)]})
    for gib in (6.0, 5.7, 5.5, 5.4, 5.0)}
OWN["llama3_full_inductor_overlap_reshard_cudagraph"] = (
    "llama3_full_inductor_block_bucketing_overlap_cudagraph",
    {"joint_passes": ["inductor_decomposition", "reshard_after_forward"]})
OWN["llama3_whole_step_fused_reshard_cudagraph"] = "llama3_whole_step", {
    "joint_passes": ["inductor_decomposition", "reshard_after_forward"],
    "passes": [BLOCKS, H200X2, "fused_clip_adamw", *LOWERED]}
OWN["llama3_8b_budget"] = "llama3_whole_step", {
    "joint_passes": ["inductor_decomposition", "reshard_after_forward", budget(45.0)],
    "passes": [BLOCKS, "fused_clip_adamw", LOWERED[0]]}
OWN["llama3_full_checkpointing"] = joint({"name": "activation_checkpointing", "policy": "full"})
PEERS: dict[str, dict[str, Any]] = {
    "eager": {}, "compile": {"compiled": True}, "compile_optimizer": {"compiled": True},
    "compile_keep": {"compiled": True, "keep": True}, "compile_loss": {"compiled": True, "loss": True},
    "compile_keep_loss": {"compiled": True, "keep": True, "loss": True},
    "compile_float8_tensorwise": {"compiled": True, "float8": "tensorwise"},  # torchao's, the extra `float8`
    "compile_float8_rowwise": {"compiled": True, "float8": "rowwise"},
}


def recipe_of(variant: str, family: str, changes: dict[str, Any]) -> Recipe:
    """What the variant runs: the family's settings, then its own, then `changes`."""
    from benchmarks.reference import RECIPES
    from workbench import load_recipe

    base, own = OWN.get(variant, (family if variant in PEERS or variant in RECIPES else variant, {}))
    recipe = load_recipe(base)
    if recipe.model.family != family:
        raise ValueError(f"{variant} is of family {recipe.model.family}: run it with --family {recipe.model.family}")
    return recipe.override({**MODELS[recipe.model.family], **own, **changes})
