"""DeepSeek v3: its mixture of experts against a definition by hand, dropped copies, and sizes.

The whole model is compared with that of transformers in tests/lab/weights.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from workbench.authoring.models.deepseek_v3 import DeepSeekV3, DeepSeekV3Config
from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.authoring.models.moe import MoE, MoEConfig, copies_of, send_by_capacity
from workbench.recipe.model_sizes import SIZES
from workbench.torch_api.distributed.experts import grouped_matmul

SMALL = MoEConfig(dim=32, expert_dim=24, n_experts=8, n_shared_experts=2, top_k=3, route_scale=1.7)
VARIANTS = {
    "sigmoid, groups": SMALL,
    "softmax, one group": replace(
        SMALL, score="softmax", normalise=False, n_groups=1, top_groups=1, top_k=4
    ),
    "static capacity, nothing dropped": replace(SMALL, dispatch="capacity", capacity_factor=8.0),
}


def swiglu(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def by_hand(module: MoE, x: torch.Tensor) -> torch.Tensor:
    """The mixture token by token and expert by expert; x (tokens, dim)."""
    c, p, rows = module.config, dict(module.named_parameters()), []
    shared = [p[f"shared_experts.w{i}.weight"] for i in (1, 2, 3)]
    size = c.n_experts // c.n_groups
    for token in x:
        logits = p["router.gate.weight"] @ token
        scores = logits.sigmoid() if c.score == "sigmoid" else logits.softmax(0)
        favoured = (scores + module.router.bias).tolist()
        groups = [range(g * size, (g + 1) * size) for g in range(c.n_groups)]
        groups.sort(key=lambda group: -sum(sorted(favoured[e] for e in group)[-2:]))
        allowed = [e for group in groups[: c.top_groups] for e in group]
        chosen = sorted(allowed, key=lambda e: -favoured[e])[: c.top_k]
        total = sum(scores[e] for e in chosen) if c.normalise else 1.0
        out = swiglu(token, *shared)
        for e in chosen:
            weights = (p[f"experts.w{i}"][e] for i in (1, 2, 3))
            out = out + c.route_scale * scores[e] / total * swiglu(token, *weights)
        rows.append(out)
    return torch.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixture_and_its_gradients_are_those_of_the_definition(variant):
    torch.manual_seed(0)
    module = MoE(VARIANTS[variant]).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.2)
        module.router.bias.normal_(0.0, 0.3)
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    out, expected = module(x).flatten(0, 1), by_hand(module, x.flatten(0, 1))
    assert (out - expected).norm() <= 1e-10 * expected.norm()
    names, parameters = zip(*module.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(y.square().mean(), parameters) for y in (out, expected))
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
