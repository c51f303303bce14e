"""activation_checkpointing: what is saved and what is recomputed, by each policy and by a rule of one's own."""

from __future__ import annotations

import pytest
import torch
from on_ranks import calls

from workbench.authoring.author import author_module
from workbench.checks.verdicts import Outcome
from workbench.errors import WorkbenchError
from workbench.graph.capture import capture
from workbench.graph.read.nodes import module_path
from workbench.passes.activation_checkpointing import checkpoint_rule
from workbench.pipeline.run_passes import run_joint, saved_bytes
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.sections import PassSpec

pytestmark = pytest.mark.integration

NAME = "activation_checkpointing"


def spec(**options):
    return PassSpec(name=NAME, options=options)


@pytest.fixture(scope="module")
def policies(authored, through):
    return {
        "none": through(authored, [spec(policy="none")]),
        "selective": through(authored, [spec()]),
        "full": through(authored, [spec(policy="full")]),
        "all matmuls": through(authored, [spec(every_nth_matmul=1)]),
        "by operator": through(authored, [spec(save=("silu",), every_nth_matmul=1000)]),
    }


def matmuls_again(found):
    records, _, _ = found
    return records[NAME].verdict("effect").evidence["recomputed_matmuls"]


def test_how_many_matmuls_the_backward_repeats(policies):
    """Seven products a layer. The last of a layer is never needed again, nor is what follows the last saved one."""
    none, selective, full = (saved_bytes(policies[p][1]) for p in ("none", "selective", "full"))
    assert none > selective > full > 0
    assert policies["none"][0][NAME].outcome is Outcome.NO_EFFECT
    assert matmuls_again(policies["all matmuls"]) == 0
    assert 5 <= matmuls_again(policies["full"]) <= 7
    assert 0 < matmuls_again(policies["selective"]) < matmuls_again(policies["full"])
    in_forward = [len(calls(policies[p][1].forward, "aten.mm")) for p in policies]
    assert set(in_forward) == {7 + 1}
    assert [len(calls(policies[p][1].backward, "aten.silu")) for p in ("full", "by operator")] == [1, 0]


class Flat(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).relu().sum()


def test_an_operator_that_no_layer_has_is_refused_and_a_model_without_layers_has_its_reason(
        fake4, authored, through):
    with pytest.raises(WorkbenchError) as caught:
        through(authored, [spec(save=("silu", "conv2d"))])
    assert "save names ['conv2d'], which no layer holds; a layer has " in str(caught.value)
    with fake4.fake_mode:
        x = torch.empty(4, 8)
    with capture(author_module(Flat(8, 8), fake4, None, batch=lambda: (x,))) as joint:
        record = run_joint(joint, [NAME])[0]
    assert record.verdict("effect").message == "no module path matches layers.<number>"


def test_nothing_is_tagged_outside_the_layers(policies):
    _, _, joint = policies["full"]
    tagged = [n for n in joint.graph.nodes if "recompute" in n.meta]
    assert tagged and {n.meta["ac_graph_id"] for n in tagged} == {0}
    assert not any(n.meta.get("partitioner_tag") == "is_backward" for n in tagged)
    loss = [n for n in joint.graph.nodes if "log_softmax" in n.name]
    assert loss and not any("recompute" in n.meta for n in loss)


def test_a_rule_of_ones_own(two_layers, through):
    name = "first_layer_only"

    @checkpoint_rule(name)
    def in_layer_0(node):
        """layer 0 is recomputed, layer 1 saved"""
        return not module_path(node).startswith("layers.0")

    everything = through(two_layers, [spec(policy="full")])
    records, pair, _ = through(two_layers, [name])
    assert records[name].outcome is Outcome.PASS
    assert CONTRACTS[name].changes == "layer 0 is recomputed, layer 1 saved"
    assert 0 < records[name].verdict("effect").evidence["recomputed_matmuls"] < matmuls_again(everything)
    assert saved_bytes(everything[1]) < saved_bytes(pair)
