"""Families of transformers, built from tiny configurations without a download."""

from collections.abc import Callable
from typing import Any

from torch import nn

from zoo.models import DIM, VOCAB, odd


def of_transformers(name: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        return getattr(transformers, model)(config)

    return make


_SIZES = dict(vocab_size=VOCAB, hidden_size=DIM, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              bos_token_id=0, eos_token_id=0, pad_token_id=0)
odd("Bert of transformers", tokens=True)(of_transformers(
    "Bert", "BertModel", **_SIZES, max_position_embeddings=40, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0))
odd("Mixtral of transformers", tokens=True, slow=True)(of_transformers(
    "Mixtral", "MixtralModel", **_SIZES, num_key_value_heads=1, max_position_embeddings=32, num_experts_per_tok=1,
    num_local_experts=2))
odd("Mamba of transformers", tokens=True, slow=True)(of_transformers(
    "Mamba", "MambaModel", vocab_size=VOCAB, hidden_size=DIM, state_size=4, num_hidden_layers=1))
odd("T5 encoder of transformers", tokens=True, slow=True)(of_transformers(
    "T5", "T5EncoderModel", vocab_size=VOCAB, d_model=DIM, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
    dropout_rate=0.0))
