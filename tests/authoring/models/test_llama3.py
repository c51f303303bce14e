"""The llama3 modules against definitions written out by hand."""

import torch
from torch.nn import functional as F

from workbench.authoring.models.attention import sdpa
from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.recipe.model_sizes import SIZES

SMALL = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=17, ffn_dim=48, max_seq_len=16)


def tokens(seed: int = 0, seq: int = 8) -> torch.Tensor:
    return torch.randint(17, (2, seq), generator=torch.Generator().manual_seed(seed))


def test_parameter_counts_and_the_configuration_s_defaults():
    assert Llama3Config() == Llama3Config(**SIZES["llama3"]["debug"])
    for flavor, parameters in (("8b", 8_030_261_248), ("1b", 1_104_218_112)):
        with torch.device("meta"):
            model = Llama3(Llama3Config(**SIZES["llama3"][flavor]))
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        assert "rope_cos" not in model.state_dict()


def test_attention_is_causal_and_grouped_queries_are_repeated_keys():
    q, k, v = (torch.randn(2, heads, 8, 4, dtype=torch.float64) for heads in (6, 2, 2))
    expected = F.scaled_dot_product_attention(
        q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), is_causal=True
    )
    torch.testing.assert_close(sdpa(q, k, v), expected)


def test_the_loss_is_the_mean_cross_entropy_in_float32():
    torch.manual_seed(0)
    model, inputs, targets = Llama3(SMALL).bfloat16(), tokens(0), tokens(1)
    seen: list[torch.Tensor] = []
    model.output.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits))
    loss = model(inputs, targets)
    picked = seen[0].float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -picked.mean())
    assert model.double()(inputs, targets).dtype == torch.float64
