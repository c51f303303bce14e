"""What the transformers library calls our parameters and sizes (Llama, DeepSeek-V3); and its own plans as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.authoring.plans import AuthoringError, ParallelPlan, matching

_FEED_FORWARD = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "wq_a": "q_a_proj",
              "q_norm": "q_a_layernorm", "wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv": "kv_b_proj"}
_BLOCK = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
          **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
          **{f"feed_forward.{ours}": f"mlp.{theirs}" for ours, theirs in _FEED_FORWARD.items()},
          **{f"moe.shared_experts.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in _FEED_FORWARD.items()},
          "moe.router.gate": "mlp.gate"}
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_SIZES = {
    "llama3": {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
               "num_key_value_heads": "n_kv_heads", "vocab_size": "vocab_size", "intermediate_size": "ffn_dim",
               "rms_norm_eps": "norm_eps", "rope_theta": "rope_theta"},
    "deepseek_v3": {"hidden_size": "dim", "num_hidden_layers": "n_layers", "first_k_dense_replace": "n_dense_layers",
                    "num_attention_heads": "n_heads", "vocab_size": "vocab_size", "intermediate_size": "ffn_dim",
                    "moe_intermediate_size": "expert_dim", "n_routed_experts": "n_experts",
                    "n_shared_experts": "n_shared_experts", "num_experts_per_tok": "top_k", "n_group": "n_groups",
                    "topk_group": "top_groups", "scoring_func": "score", "norm_topk_prob": "normalise",
                    "routed_scaling_factor": "route_scale", "q_lora_rank": "q_lora_rank",
                    "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_dim",
                    "qk_rope_head_dim": "qk_rope_dim", "v_head_dim": "v_dim", "rms_norm_eps": "norm_eps",
                    "rope_theta": "rope_theta"},
}
FAMILIES = tuple(_SIZES)
_GATHERED = {"style": "colwise", "output": "replicate"}
_STYLES: dict[str, str | dict[str, str]] = {
    "colwise": "colwise",
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": "rowwise",
    "rowwise_split_input": {"style": "rowwise", "input": "replicate"},
    "embedding_rowwise": {"style": "rowwise", "input": "replicate"},
}


def plan_of(model: nn.Module) -> ParallelPlan:
    """The tensor-parallel plan that a model of transformers has, as one for `author_module`; its blocks are FSDP units.

    model: of transformers, or a module that holds one, such as CausalLM. Source: `PreTrainedModel.tp_plan`, which joins
    `base_model_tp_plan` of the config with the class's own. Patterns that match no module are left out, because one
    plan serves a family. Raises AuthoringError for a model without a plan, and for a style that ParallelPlan lacks.
    """
    paths = [path for path, _ in model.named_modules()]
    plans = ((path, getattr(part, "tp_plan", None)) for path, part in model.named_modules())
    root, styles = next(((path, plan) for path, plan in plans if plan), ("", {}))
    tensor: dict[str, str | dict[str, str]] = {}
    for name, style in styles.items():
        pattern = f"{root}.{name}".removeprefix(".")
        if not matching(pattern, paths):
            continue
        if style not in _STYLES:
            raise AuthoringError(
                f"plan_of: style {style!r} of {pattern!r} is none of {', '.join(_STYLES)}: write a ParallelPlan"
            )
        tensor[pattern] = _STYLES[style]
    if not tensor:
        raise AuthoringError(
            f"plan_of: {type(model).__name__} has no tensor-parallel plan of transformers: write a ParallelPlan"
        )
    blocks = (pattern.partition(".*")[0] + ".*" for pattern in tensor if ".*" in pattern)
    return ParallelPlan(tensor, tuple(dict.fromkeys(blocks)))


@dataclass(frozen=True)
class Place:
    """Where one of our tensors lies in their files. names: one, or one for each expert of a stack.

    order: row i of ours is row order[i] of theirs; None keeps the order.
    """

    names: tuple[str, ...]
    stacked: bool = False
    order: tuple[int, ...] | None = None


def place_of(name: str, shape: torch.Size, sizes: Mapping[str, Any]) -> Place:
    """Where our tensor `name` of this shape lies in a model of these sizes."""
    path, _, kind = name.rpartition(".")
    if path in _TOP:
        return Place((f"{_TOP[path]}.{kind}",))
    _, index, rest = path.split(".", 2)
    layer = f"model.layers.{index}"
    if rest == "moe.experts":
        names = (f"{layer}.mlp.experts.{i}.{_FEED_FORWARD[kind]}.weight" for i in range(shape[0]))
        return Place(tuple(names), stacked=True)
    if rest == "moe.router":
        return Place((f"{layer}.mlp.gate.e_score_correction_{kind}",))
    theirs = _BLOCK[rest] if rest != "attention.wq" or not sizes.get("q_lora_rank") else "self_attn.q_b_proj"
    return Place((f"{layer}.{theirs}.{kind}",), order=_order(rest, shape, sizes))


def _order(path: str, shape: torch.Size, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
    """DeepSeek's rotary pairs are neighbours in their rows, and half a width apart in ours."""
    if "qk_rope_dim" not in sizes or path not in ("attention.wq", "attention.wkv_a"):
        return None
    turned = sizes["qk_rope_dim"]
    kept = sizes["qk_nope_dim"] if path == "attention.wq" else sizes["kv_lora_rank"]
    head = [*range(kept), *range(kept, kept + turned, 2), *range(kept + 1, kept + turned, 2)]
    return tuple(start + i for start in range(0, shape[0], kept + turned) for i in head)


def config_of(family: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model of these sizes."""
    config = {theirs: sizes[ours] for theirs, ours in _SIZES[family].items()}
    config |= {"max_position_embeddings": sizes["max_seq_len"], "hidden_act": "silu", "tie_word_embeddings": False}
    if family == "llama3":
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **config}
    config |= {"q_lora_rank": sizes["q_lora_rank"] or None, "num_key_value_heads": sizes["n_heads"],
              "rope_interleave": True}
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **config}


def misfit(family: str, sizes: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What their config.json says that a model of these sizes would compute otherwise, and the remedy; or nothing."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return f"it scales rotary positions ({kind}), which {family} here does not do: take other weights"
    theirs = {"rope_theta": rope.get("rope_theta"), **config}
    for key, ours in _SIZES[family].items():
        there, here = theirs.get(key), sizes[ours]
        if there is not None and there != here:
            return f"{key} is {there!r}, and the recipe's model.{ours} is {here!r}: set model.{ours} to {there!r}"
    return "" if config.get("rope_interleave", True) else "rope_interleave is false, and only true is read"
