"""Families of transformers, built from tiny configurations without a download."""

from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.models import DIM, VOCAB, odd


def of_transformers(name: str, model: str = "", **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        return getattr(transformers, model or f"{name}Model")(config)

    return make


_SIZES = dict(vocab_size=VOCAB, hidden_size=DIM, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              bos_token_id=0, eos_token_id=0, pad_token_id=0)
_LLAMA = {**_SIZES, "num_key_value_heads": 1, "max_position_embeddings": 32}
_BERT = {**_SIZES, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT = dict(vocab_size=VOCAB, n_embd=DIM, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
_EXPERTS = {"num_experts_per_tok": 1}

for family, sizes in {"Llama": _LLAMA, "Bert": _BERT, "GPT2": _GPT}.items():
    odd(f"{family} of transformers", tokens=True)(of_transformers(family, **sizes))

for family, sizes in {
    "Mixtral": {**_LLAMA, **_EXPERTS, "num_local_experts": 2},
    "DeepseekV3": {**_SIZES, **_EXPERTS, "num_key_value_heads": 2, "n_routed_experts": 2, "n_group": 1,
                   "topk_group": 1, "moe_intermediate_size": 8, "q_lora_rank": 4, "kv_lora_rank": 4,
                   "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 0},
    "Albert": {**_BERT, "embedding_size": 4, "num_hidden_layers": 2},  # both layers are one
    "Mamba": dict(vocab_size=VOCAB, hidden_size=DIM, state_size=4, num_hidden_layers=1),
}.items():
    odd(f"{family} of transformers", tokens=True, slow=True)(of_transformers(family, **sizes))

# Under FSDP and TP, its embedding differs by 1.7e-5 in float32, and no parameter by more than 1.2e-16 in float64: the
# order of sums, and no wrong gradient.
odd("Gemma2 of transformers", tokens=True, slow=True, double=True)(
    of_transformers("Gemma2", **_LLAMA | {"head_dim": 4, "num_hidden_layers": 2}))
odd("T5 encoder of transformers", tokens=True, slow=True)(of_transformers(
    "T5", "T5EncoderModel", vocab_size=VOCAB, d_model=DIM, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
    dropout_rate=0.0))
