"""A user's own model goes where a recipe goes: a plain module with a plan, and one of Hugging Face's."""


import pytest
import torch
from torch import nn

from workbench import (
    ParallelPlan,
    Recipe,
    WorkbenchError,
    author,
    fake_world,
    load_recipe,
    register_model,
    run,
)
from workbench.authoring import families
from workbench.recipe.recipe import RecipeError


class Net(nn.Module):
    """What a user's cell defines: a feed-forward on each token."""

    def __init__(self, vocab_size: int, dim: int, n_layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, dim), nn.Linear(dim, vocab_size)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(n_layers))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def mixer(name: str = "mixer", **sizes: int) -> None:
    plan = ParallelPlan(tensor={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}, units=("embed", "blocks.*", "head"))

    @register_model(name, sizes={"vocab_size": 256, "max_seq_len": 128, "dim": 32, "n_layers": 2, **sizes}, plan=plan)
    def make(sizes):
        return Net(sizes["vocab_size"], sizes["dim"], sizes["n_layers"])


def recipe(family: str, mesh: dict[str, int], **more: object) -> Recipe:
    sizes = {"mesh.dp_shard": 1, "mesh.tp": 1, **{f"mesh.{axis}": size for axis, size in mesh.items()}}
    return load_recipe("llama3").override({"model.family": family, "data.seq_len": 16, "training.steps": 4,
                                           "training.lr": 0.02, **sizes, **more})


@pytest.mark.nightly
@pytest.mark.ranks
def test_a_users_module_with_its_plan_goes_the_whole_way(pool4):
    mixer()
    passes = {"joint_passes": ["reshard_after_forward"], "passes": ["transformer_block_bucketing"]}
    report = run(recipe("mixer", {"dp_shard": 2, "tp": 2}, **passes), world=pool4, level="full", progress=False)
    assert report.ok and {row.outcome for row in report.passes} == {"PASS"}
    assert {row.verdict("numerics").outcome for row in report.passes} == {"PASS"}
    assert [v.outcome for v in report.pipeline if v.check == "numerics"] == ["PASS"]
    assert report.training.losses[-1] < report.training.losses[0]


def test_sizes_of_the_recipe_reach_the_model_and_a_cell_run_again_replaces_it():
    def parameters(**sizes: int) -> int:
        changed = recipe("mixer", {}, **{f"model.{name}": size for name, size in sizes.items()})
        with fake_world(1) as world:
            return len(list(author(changed, world).module.parameters()))

    mixer()
    assert parameters() == 3 + 2 * 4 and parameters(n_layers=3) == 3 + 3 * 4
    mixer(n_layers=1, n_experts=4)  # a size that our own models have rules for
    assert parameters() == 3 + 4


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match="unknown family 'mixer': one of llama3, deepseek_v3, or register it with"):
        recipe("mixer", {})
    with pytest.raises(WorkbenchError, match="model 'mine': sizes has no max_seq_len"):
        register_model("mine", sizes={"vocab_size": 8})
    with pytest.raises(WorkbenchError, match="'llama3' is the package's own family"):
        register_model("llama3", sizes={"vocab_size": 8, "max_seq_len": 8})
    mixer()
    with pytest.raises(RecipeError, match="data.seq_len: 16 is more than model.max_seq_len 8"):
        recipe("mixer", {}).override({"model.max_seq_len": 8})
    with pytest.raises(RecipeError, match="mixer has no n_heads"):
        recipe("mixer", {}).override({"model.n_heads": 8})
    made = recipe("mixer", {})
    del families._FAMILIES["mixer"]
    with pytest.raises(WorkbenchError, match="no model family 'mixer' here: register it"):
        families.find_family(made.model.family)
