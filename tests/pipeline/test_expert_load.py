"""The load of experts: what is counted, how uneven it is, and a bias that moves against it."""


import pytest
import torch

from workbench import World, author, load_recipe, train
from workbench.authoring.models.moe import MoE, MoEConfig
from workbench.pipeline.expert_load import ExpertLoad, balance
from workbench_lessons.l09_route_tokens_to_experts.load_picture import table

LOAD = ExpertLoad(
    ["layers.1.moe", "layers.2.moe"],
    tokens=[[[[3, 1, 0, 0], [5, 1, 1, 1]], [[1, 1, 1, 1], [2, 2, 2, 2]]],
            [[[1, 1, 1, 1], [2, 2, 2, 2]], [[3, 0, 0, 1], [2, 2, 2, 2]]]],
    dropped=[[[1, 4], [0, 0]], [[0, 0], [0, 2]]],
)
ALONE = World("gloo", 1, 0, torch.device("cpu"))


def test_the_table_has_a_line_for_each_step_and_layer():
    assert table(LOAD).splitlines() == [
        "step  layer            e0     e1     e2     e3  max/mean  dropped",
        "   0  layers.1.moe      8      2      1      1      2.67        5",
        "   0  layers.2.moe      3      3      3      3      1.00        0",
        "   1  layers.1.moe      3      3      3      3      1.00        0",
        "   1  layers.2.moe      5      2      2      3      1.67        2",
    ]


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
    import torch.distributed as dist

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


@pytest.mark.integration
def test_training_notes_every_step():
    alone = {"mesh.dp_shard": 1, "mesh.tp": 1, "training.steps": 2, "model.n_layers": 2}
    recipe = load_recipe("deepseek_v3").override({**alone, "mesh.ep": 1})
    load = train(author(recipe, ALONE)).load
    copies = recipe.data.batch_per_rank * recipe.data.seq_len * 2
    assert load.layers == ["layers.1.moe"] and [load.copies(step) for step in range(2)] == [copies, copies]
    assert load.fell(0) == load.fell(1) == 0  # dropless
    assert train(author(load_recipe("llama3").override(alone), ALONE)).load is None
