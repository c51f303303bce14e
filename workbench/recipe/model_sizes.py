"""Sizes of the model families' flavors: one table for recipes and models. No torch here."""

from __future__ import annotations

from typing import Any

_DEEPSEEK = {"rope_theta": 10_000.0, "norm_eps": 1e-6, "max_seq_len": 4096, "dispatch": "dropless",
             "capacity_factor": 1.25, "balance_rate": 0.001}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "llama3": {
        "debug": {"dim": 128, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 256, "ffn_dim": 384,
                  "rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": 2048},
        "1b": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32_000, "ffn_dim": 8192,
               "rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": 2048},
        "8b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128_256, "ffn_dim": 14_336,
               "rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": 8192},
    },
    "deepseek_v3": {
        "debug": {"dim": 128, "n_layers": 3, "n_dense_layers": 1, "n_heads": 4, "vocab_size": 256, "ffn_dim": 384,
                  "expert_dim": 64, "n_experts": 8, "n_shared_experts": 1, "top_k": 2, "n_groups": 4, "top_groups": 2,
                  "score": "sigmoid", "normalise": True, "route_scale": 1.0, "q_lora_rank": 0, "kv_lora_rank": 64,
                  "qk_nope_dim": 32, "qk_rope_dim": 16, "v_dim": 32, **_DEEPSEEK},
        # arXiv:2405.04434, DeepSeek-V2-Lite
        "16b": {"dim": 2048, "n_layers": 27, "n_dense_layers": 1, "n_heads": 16, "vocab_size": 102_400,
                "ffn_dim": 10_944, "expert_dim": 1408, "n_experts": 64, "n_shared_experts": 2, "top_k": 6,
                "n_groups": 1, "top_groups": 1, "score": "softmax", "normalise": False, "route_scale": 1.0,
                "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128,
                **_DEEPSEEK},
        # arXiv:2412.19437, table of section 4.2
        "671b": {"dim": 7168, "n_layers": 61, "n_dense_layers": 3, "n_heads": 128, "vocab_size": 129_280,
                 "ffn_dim": 18_432, "expert_dim": 2048, "n_experts": 256, "n_shared_experts": 1, "top_k": 8,
                 "n_groups": 8, "top_groups": 4, "score": "sigmoid", "normalise": True, "route_scale": 2.5,
                 "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_dim": 128, "qk_rope_dim": 64, "v_dim": 128,
                 **_DEEPSEEK},
    },
}
"""Sizes of each family's flavors; a recipe's model section may give others."""
