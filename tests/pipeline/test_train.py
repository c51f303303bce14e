"""The training loop: this rank's batches, the whole gradient's norm, the settings around it."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from on_ranks import FSDP_TP, gradients, small

from workbench.authoring.author import author, author_module
from workbench.errors import WorkbenchError
from workbench.pipeline.train import Batches, total_norm, train
from workbench.torch_api.determinism import deterministic
from workbench.world.fake import fake_world
from workbench.world.mesh import World, current_world

pytestmark = pytest.mark.integration

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_deterministic_settings_come_back():
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(False):  # somebody outside asked for it: it stays
            assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_ranks_of_one_tp_group_read_the_same_text_and_others_do_not():
    seen = []
    for rank in range(4):
        with fake_world(4, rank) as world:
            seen.append(Batches(author(small(FSDP_TP), world)).at(0)[0].tolist())
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_a_module_without_a_recipe_has_no_text():
    module = torch.nn.Linear(2, 2)
    authored = author_module(module, World("gloo", 1, 0, torch.device("cpu")), None)
    for use in (Batches, train):
        with pytest.raises(WorkbenchError, match="authored without a recipe"):
            use(authored)


def norms(recipe):
    """(our norm of the whole gradient, torch's of the gathered gradients)."""
    authored = author(recipe, current_world())
    authored.module(*Batches(authored).at(0)).backward()
    local = [p.grad for p in authored.module.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in local]
    assert set(gradients(authored)) == {n for n, _ in authored.module.named_parameters()}
    return float(total_norm(local)), float(torch.nn.utils.get_total_norm(whole))


def trained(recipe):
    from workbench.pipeline.build import build

    found = build(recipe, current_world())
    heard = []
    result = train(found.authored, found.step, progress=lambda step, loss: heard.append((step, loss)))
    return result, heard


@pytest.mark.ranks
def test_the_norm_is_the_whole_gradients(pool4):
    for ours, theirs in pool4.run(norms, small(FSDP_TP)):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.ranks
def test_a_run_is_measured_and_the_same_on_every_rank(pool4):
    results = pool4.run(trained, small(FSDP_TP).override({"training.steps": 3, "training.lr": 0.01}))
    first, heard = results[0]
    assert len(first.losses) == len(first.norms) == len(first.step_seconds) == 3
    assert heard == list(enumerate(first.losses)) and first.losses[2] < first.losses[0]
    assert all(r.losses == first.losses and r.norms == first.norms for r, _ in results)
    assert first.tokens_per_step == 16 * 2 * 2 and first.peak_bytes is None
