"""Sizes of the model families' flavors: one table for recipes and models. No torch here."""

from __future__ import annotations

SIZES: dict[str, dict[str, dict[str, float]]] = {
    "llama3": {
        "debug": {"dim": 128, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 256, "ffn_dim": 384,
                  "rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": 2048},
        "1b": {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32_000, "ffn_dim": 8192,
               "rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": 2048},
        "8b": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128_256, "ffn_dim": 14_336,
               "rope_theta": 500_000.0, "norm_eps": 1e-5, "max_seq_len": 8192},
    }
}
"""Sizes of each family's flavors; a recipe's model section may give others."""
