"""DeepSeek v3 against definitions by hand, token by token and expert by expert; dropped copies, and sizes."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from workbench.authoring.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.authoring.models.moe import copies_of, send_by_capacity
from workbench.recipe.model_sizes import SIZES
from workbench.torch_api.distributed.experts import grouped_matmul

SMALL = DeepSeekV3Config(
    dim=32, n_layers=2, n_dense_layers=1, n_heads=2, vocab_size=17, ffn_dim=48, expert_dim=24, n_experts=8,
    n_shared_experts=2, top_k=3, n_groups=4, top_groups=2, kv_lora_rank=16, qk_nope_dim=8, qk_rope_dim=4, v_dim=6,
    max_seq_len=16, route_scale=1.7,
)
VARIANTS = {
    "sigmoid, groups": SMALL,
    "softmax, one group, low-rank queries": replace(SMALL, score="softmax", normalise=False, n_groups=1, top_groups=1,
                                                    top_k=4, q_lora_rank=12),
    "static capacity, nothing dropped": replace(SMALL, dispatch="capacity", capacity_factor=8.0),
}


def built(config: DeepSeekV3Config) -> DeepSeekV3:
    torch.manual_seed(0)
    model = DeepSeekV3(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.2)
        for layer in model.layers[config.n_dense_layers :]:
            layer.moe.router.bias.normal_(0.0, 0.3)
    angles = [angles_at(t, config) * 2 for t in range(config.max_seq_len)]
    table, sign = torch.tensor(angles, dtype=torch.float64), torch.tensor([-1.0, 1.0])
    model.rope_cos = table.cos()  # in float64: the model's own table is exact to float32
    model.rope_sin = table.sin() * sign.repeat_interleave(config.qk_rope_dim // 2)
    return model


def angles_at(position: int, c: DeepSeekV3Config) -> list[float]:
    half = c.qk_rope_dim // 2
    return [position * c.rope_theta ** (-i / half) for i in range(half)]


def batch(config: DeepSeekV3Config, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: torch.Tensor, position: int, c: DeepSeekV3Config) -> torch.Tensor:
    """One vector's pairs (i, i + half) as complex numbers, each turned by its angle."""
    angles = torch.tensor(angles_at(position, c), dtype=torch.float64)
    first, second = x.chunk(2)
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag))


def attention(p: dict[str, torch.Tensor], x: torch.Tensor, c: DeepSeekV3Config) -> torch.Tensor:
    """x (seq, dim) of one sequence."""
    q = x
    if c.q_lora_rank:
        q = norm(q @ p["wq_a.weight"].T, p["q_norm.weight"], c.norm_eps)
    q = (q @ p["wq.weight"].T).view(len(x), c.n_heads, -1)
    both = x @ p["wkv_a.weight"].T
    latent = norm(both[:, : c.kv_lora_rank], p["kv_norm.weight"], c.norm_eps)
    kv = (latent @ p["wkv.weight"].T).view(len(x), c.n_heads, -1)
    shared = [turned(both[t, c.kv_lora_rank :], t, c) for t in range(len(x))]
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(c.n_heads):
            query = torch.cat((q[t, h, : c.qk_nope_dim], turned(q[t, h, c.qk_nope_dim :], t, c)))
            keys = torch.stack([torch.cat((kv[s, h, : c.qk_nope_dim], shared[s])) for s in range(t + 1)])
            weights = (keys @ query / math.sqrt(c.qk_nope_dim + c.qk_rope_dim)).softmax(0)
            heads.append(weights @ kv[: t + 1, h, c.qk_nope_dim :])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ p["wo.weight"].T


def swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def mixture(p: dict[str, torch.Tensor], x: torch.Tensor, bias: torch.Tensor, c: DeepSeekV3Config) -> torch.Tensor:
    rows = []
    for token in x:
        logits = p["router.gate.weight"] @ token
        scores = logits.sigmoid() if c.score == "sigmoid" else logits.softmax(0)
        favoured = (scores + bias).tolist()
        size = c.n_experts // c.n_groups
        groups = sorted(range(c.n_groups), reverse=True,
                        key=lambda g: sum(sorted(favoured[g * size : (g + 1) * size])[-2:]))[: c.top_groups]
        allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -favoured[e])[: c.top_k]
        total = sum(scores[e] for e in chosen) if c.normalise else 1.0
        out = swiglu(token, *(p[f"shared_experts.w{i}.weight"] for i in (1, 2, 3)))
        for e in chosen:
            out = out + c.route_scale * scores[e] / total * swiglu(token, *(p[f"experts.w{i}"][e] for i in (1, 2, 3)))
        rows.append(out)
    return torch.stack(rows)


def plain_loss(model: DeepSeekV3, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    c, every = model.config, dict(model.named_parameters())

    def of(path: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(path + "."): value for name, value in every.items() if name.startswith(path + ".")}

    losses = []
    for sequence, wanted in zip(tokens, targets, strict=True):
        x = every["tok_embeddings.weight"][sequence]
        for i, layer in enumerate(model.layers):
            p = of(f"layers.{i}")
            x = x + attention(of(f"layers.{i}.attention"), norm(x, p["attention_norm.weight"], c.norm_eps), c)
            normed = norm(x, p["ffn_norm.weight"], c.norm_eps)
            if i < c.n_dense_layers:
                x = x + swiglu(normed, *(p[f"feed_forward.w{k}.weight"] for k in (1, 2, 3)))
            else:
                x = x + mixture(of(f"layers.{i}.moe"), normed, layer.moe.router.bias, c)
        logits = norm(x, every["norm.weight"], c.norm_eps) @ every["output.weight"].T
        losses += [-logits[t].log_softmax(0)[wanted[t]] for t in range(len(wanted))]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_the_definition(variant):
    model = built(VARIANTS[variant])
    inputs = batch(model.config)
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss, expected = model(*inputs), plain_loss(model, *inputs)
    assert loss.dtype == torch.float64 and abs(loss - expected) <= 1e-10 * abs(expected)
    ours, theirs = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    for name, a, b in zip(names, ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm(), name


@pytest.mark.parametrize(("family", "model", "config", "flavors"), [
    ("llama3", Llama3, Llama3Config, {"8b": 8_030_261_248, "1b": 1_104_218_112}),
    ("deepseek_v3", DeepSeekV3, DeepSeekV3Config, {"16b": 15.7e9, "671b": 671.0e9})])
def test_parameter_counts_and_the_configuration_s_defaults(family, model, config, flavors):
    assert config() == config(**SIZES[family]["debug"])
    for flavor, parameters in flavors.items():
        with torch.device("meta"):
            module = model(config(**SIZES[family][flavor]))
        counted = sum(parameter.numel() for parameter in module.parameters())
        assert counted == (parameters if family == "llama3" else pytest.approx(parameters, abs=5e7))
        assert "rope_cos" not in module.state_dict()


def test_capacity_drops_the_last_and_says_so():
    copies = torch.arange(1.0, 6.0).unsqueeze(1)
    experts = torch.tensor([1, 0, 1, 1, 0])
    rows, _, back, dropped = send_by_capacity(copies, experts, copies_of(experts, 2), None, 2)
    assert rows.squeeze(2).tolist() == [[2.0, 5.0], [1.0, 3.0]] and dropped.item() == 1
    assert back(rows).flatten().tolist() == [1.0, 2.0, 3.0, 0.0, 5.0]


@pytest.mark.gpu
def test_one_kernel_gives_what_a_product_for_each_group_gives():
    torch.manual_seed(0)
    rows, weights = torch.randn(64, 32), torch.randn(4, 32, 48) / 6
    counts = [17, 0, 40, 7]
    cuda = [t.cuda().bfloat16().requires_grad_() for t in (rows, weights)]
    sizes = torch.tensor(counts, device="cuda")
    plain = [t.detach().float().cpu().requires_grad_() for t in cuda]
    for given in (cuda, plain):
        grouped_matmul(given[0], given[1], sizes.to(given[0].device), counts).square().sum().backward()
    for ours, expected in zip(cuda, plain, strict=True):
        assert (ours.grad.float().cpu() - expected.grad).norm() < 1e-2 * expected.grad.norm()
