"""A plan of transformers as one of ours: the sharded model computes what the plain one does."""

import pytest
import torch
from torch import nn

from workbench import CausalLM, author_module, capture, current_world, partition
from workbench.authoring.plans import AuthoringError
from workbench.checks.authoring import check_authoring
from workbench.graph.facts import Known
from workbench.lab.weights.hugging_face import plan_of
from workbench.pipeline.proofs.authoring_proof import prove_authoring
from workbench.torch_api.restoring import shard_of

transformers = pytest.importorskip("transformers")


def llama() -> CausalLM:
    """Whose output layer has the embedding's weight."""
    torch.manual_seed(0)
    return CausalLM(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True)))


def authoring() -> tuple[str, str, dict[str, list[int]]]:
    """(outcome, message, shapes of local parameters) of a llama on two ranks."""
    world, model = current_world(), llama()
    authored = author_module(model, world, world.mesh_of({"tp": 2}), plan_of(model))
    batch = torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(0)).unbind()
    graphs = partition(capture(authored, batch=batch)).graphs
    (verdict,) = check_authoring(Known(authoring=prove_authoring(authored, batch, graphs)))
    shapes = {name: list(shard_of(value).shape) for name, value in authored.module.named_parameters()}
    return str(verdict.outcome), verdict.message, shapes


@pytest.mark.ranks
def test_a_llama_cut_by_its_own_plan_computes_the_plain_ones_gradients(pool2):
    for outcome, message, shapes in pool2.run(authoring):
        assert outcome == "PASS", message
        local = {name.split("layers.0.")[-1]: shape for name, shape in shapes.items()}
        assert local["self_attn.q_proj.weight"] == [16, 32] and local["mlp.down_proj.weight"] == [32, 24]
        assert local["model.model.embed_tokens.weight"] == [32, 32]


def test_blocks_are_units_and_modules_without_a_place_are_left_out():
    model = llama()
    model.model.tp_plan = {**model.model.tp_plan, "model.layers.*.self_attn.absent": "colwise"}
    plan = plan_of(model)
    assert plan.units == ("model.model.layers.*",) and len(plan.tensor) == len(model.model.tp_plan) - 1


def test_what_has_no_plan_of_ours_is_refused():
    model = llama()
    with pytest.raises(AuthoringError, match="plan_of: Linear has no tensor-parallel plan of transformers: write a"):
        plan_of(nn.Linear(2, 2))
    model.model.tp_plan = {"model.norm": "sequence_parallel"}
    with pytest.raises(AuthoringError, match="style 'sequence_parallel' of 'model.model.norm' is none of colwise, "):
        plan_of(model)
