"""Dropout under compiled passes: the draws are those of eager PyTorch from the same seed."""

import warnings

import pytest
import torch
from torch import nn

import workbench
from workbench import WorkbenchError, region

pytestmark = pytest.mark.integration
INDUCTOR = {"joint_passes": ["inductor_decomposition"], "passes": ["full_inductor_compilation"]}
RECOMPUTED = {"joint_passes": [{"name": "activation_checkpointing", "policy": "full"}], "passes": ["graph_cleanup"]}


class Dropping(nn.Module):
    """Two draws, one inside a region."""

    def __init__(self, draw=lambda p: torch.rand_like(p) < p):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.draw = draw

    def forward(self, x):
        with region("feed_forward"):
            x = nn.functional.dropout(torch.relu(self.up(x)), 0.5)
            x = self.down(x)
        return (x * self.draw(torch.full_like(x, 0.5))).square().mean()


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
    step = workbench.compile(model, example=(x,), **INDUCTOR | {"passes": [compiler]}, progress=False)
    assert step.report.ok, str(step.report)
    require_eagers_draws(model, lambda: model(x), lambda: step(x), 1e-5)


def test_what_inductor_would_draw_otherwise_is_refused():
    model, x = Dropping(torch.bernoulli), torch.randn(4, 8)
    with pytest.raises(WorkbenchError, match="^node 'bernoulli' is torch.bernoulli of a tensor, .*: write "):
        workbench.compile(model, example=(x,), **INDUCTOR, level="light", progress=False)


@pytest.mark.parametrize(("level", "lists", "tolerance"), [
    pytest.param("full", RECOMPUTED, 1e-6, marks=pytest.mark.compat),
    pytest.param("light", INDUCTOR, 1e-5, marks=pytest.mark.nightly),  # a quarter of a minute
], ids=["recomputed", "inductor"])
def test_a_transformers_model_with_labels_and_dropout_as_it_is(level, lists, tolerance):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train()
    assert model.config.resid_pdrop == model.config.embd_pdrop == model.config.attn_pdrop == 0.1
    tokens = torch.randint(64, (2, 8))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        step = workbench.compile(model, example=inputs, progress=False, level=level, **lists)
    told = [str(warning.message) for warning in log]
    assert len(told) == len(set(told)) and step.report.ok
    assert type(step(**inputs)) is type(model(**inputs))
    require_eagers_draws(model, lambda: model(**inputs).loss, lambda: step(**inputs).loss, tolerance)
