"""The load of experts: what is counted, how uneven it is, and a bias that moves against it."""

import pytest
import torch
import torch.distributed as dist

from workbench.authoring.models.moe import MoE, MoEConfig
from workbench.pipeline.expert_load import ExpertLoad, balance


def layer(rate: float, **sizes: object) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(dim=16, expert_dim=8, n_experts=4, n_groups=1, top_groups=1, balance_rate=rate, **sizes))


def balanced(rate: float) -> ExpertLoad:
    """30 steps on the same tokens, with one expert that starts far ahead."""
    moe, load = layer(rate, dispatch="capacity"), ExpertLoad(["moe"])
    moe.router.bias[0] = 0.3
    x = torch.randn(2, 64, 16)
    for _ in range(30):
        moe(x)
        load.note([balance(moe)])
    return load


def test_a_skewed_load_gets_more_even_by_the_bias_and_only_by_it():
    even, uneven = balanced(0.02), balanced(0.0)
    assert even.imbalance(0, 0) == uneven.imbalance(0, 0) == 2  # every token goes to expert 0
    assert even.imbalance(29, 0) < 1.2 and even.fell(29) == 0 < even.fell(0)
    assert uneven.imbalance(29, 0) == 2 and uneven.fell(29) == uneven.fell(0)


def counted_apart() -> tuple[list[float], ExpertLoad]:
    rank, moe, load = dist.get_rank(), layer(0.01), ExpertLoad(["moe"])
    moe.tokens.copy_(torch.tensor([[6, 2, 0, 0], [0, 2, 6, 0]][rank]))  # each is uneven in another way
    moe.dropped.fill_(rank)
    load.note([balance(moe)])
    return moe.router.bias.tolist(), load


def test_the_ranks_counts_are_added_before_the_bias_moves(pool2):
    (bias, load), (other, same) = pool2.run(counted_apart)
    assert bias == other == pytest.approx([-0.01, 0, -0.01, 0.01])
    assert load == same
    assert load.tokens == [[[[6, 2, 0, 0], [0, 2, 6, 0]]]] and load.dropped == [[[0, 1]]]
