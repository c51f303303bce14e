"""Dropout under compiled passes: the draws are those of eager PyTorch from the same seed."""

import pytest
import torch
from torch import nn

import workbench
from workbench import WorkbenchError, region

pytestmark = pytest.mark.integration


class Dropping(nn.Module):
    """Two draws, one inside a region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with region("feed_forward"):
            x = nn.functional.dropout(torch.relu(self.up(x)), 0.5)
            x = self.down(x)
        return (x * self.draw(torch.full_like(x, 0.5))).square().mean()

    def draw(self, p: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(p) < p


class Bernoulli(Dropping):
    def draw(self, p: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(p)


def require_eagers_draws(model, call, compiled_call, tolerance):
    """The loss, each gradient, and the generator afterwards."""
    results = []
    for function in (call, compiled_call):
        torch.manual_seed(1)
        loss = function()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        results.append((loss.detach(), gradients, torch.get_rng_state()))
    (loss, gradients, state), (ours, our_gradients, our_state) = results
    assert torch.equal(state, our_state)
    for expected, value in zip([loss, *gradients], [ours, *our_gradients], strict=True):
        assert (value - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("compiler", ["full_inductor_compilation", "regional_inductor"])
def test_compiled_draws_are_those_of_eager(compiler):
    model, x = Dropping(), torch.randn(4, 8)
    step = workbench.compile(
        model, example=(x,), joint_passes=["inductor_decomposition"], passes=[compiler], progress=False
    )
    assert step.report.ok, str(step.report)
    require_eagers_draws(model, lambda: model(x), lambda: step(x), 1e-5)


def test_what_inductor_would_draw_otherwise_is_refused():
    lists = {"joint_passes": ["inductor_decomposition"], "passes": ["full_inductor_compilation"]}
    with pytest.raises(WorkbenchError, match="^node 'bernoulli' is torch.bernoulli of a tensor, .*: write "):
        workbench.compile(Bernoulli(), example=(torch.randn(4, 8),), **lists, level="light", progress=False)


@pytest.mark.nightly  # a second model, whose code takes Inductor a quarter of a minute
def test_a_gpt2_with_its_dropout():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(64, (2, 8)))
    step = workbench.compile(
        model, example=batch, progress=False, level="light",
        joint_passes=["inductor_decomposition"], passes=["full_inductor_compilation"],
    )
    require_eagers_draws(model, lambda: model(**batch).loss, lambda: step(**batch).loss, 1e-5)
