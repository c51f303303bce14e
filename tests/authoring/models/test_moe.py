"""Routing, and both dispatches on one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workbench.authoring.models.moe import (
    MoE,
    MoEConfig,
    best_experts,
    copies_of,
    send_by_capacity,
    send_dropless,
)
from workbench.torch_api.distributed.experts import grouped_matmul

CONFIG = MoEConfig(dim=16, expert_dim=8, n_experts=4, n_groups=1, top_groups=1)


def test_groups_limit_the_choice():
    scores = torch.tensor([[9.0, 0.0, 5.0, 4.5, 0.1, 0.2]])  # groups of two are worth 9.0, 9.5 and 0.3
    assert best_experts(scores, 2).tolist() == [[0, 2]]
    assert best_experts(scores, 2, n_groups=3, top_groups=1).tolist() == [[2, 3]]
    assert best_experts(scores, 2, n_groups=3, top_groups=2).tolist() == [[0, 2]]


def test_the_bias_counts_in_the_choice_and_not_in_the_weights():
    torch.manual_seed(0)
    moe, x = MoE(replace(CONFIG, top_k=1, normalise=False)), torch.randn(6, 16)
    with torch.no_grad():
        before, _ = moe.router(x)
        moe.router.bias[3] = 10.0
        weights, experts = moe.router(x)
    assert set(experts.flatten().tolist()) == {3}
    assert torch.equal(weights.flatten(), moe.router.gate(x).sigmoid()[:, 3]) and (weights < before + 1e-6).all()


def test_capacity_drops_the_last_and_says_so():
    copies = torch.arange(1.0, 6.0).unsqueeze(1)
    experts = torch.tensor([1, 0, 1, 1, 0])
    rows, _, back, dropped = send_by_capacity(copies, experts, copies_of(experts, 2), None, 2)
    assert rows.squeeze(2).tolist() == [[2.0, 5.0], [1.0, 3.0]] and dropped.item() == 1
    assert back(rows).flatten().tolist() == [1.0, 2.0, 3.0, 0.0, 5.0]


def test_dropless_groups_rows_by_expert_and_brings_them_back():
    copies = torch.arange(1.0, 6.0).unsqueeze(1)
    experts = torch.tensor([2, 0, 2, 2, 0])
    rows, counts, back, dropped = send_dropless(copies, experts, copies_of(experts, 3), None)
    assert rows.flatten().tolist() == [2.0, 5.0, 1.0, 3.0, 4.0] and dropped.item() == 0
    assert counts[1] == [2, 0, 3]
    assert torch.equal(back(rows), copies)


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
