import torch
from graphs_by_hand import gather, shards, trace
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput

from workbench.checks.memory import estimate, verdict
from workbench.checks.verdicts import Outcome


def pair(keeps):
    """Forward that saves its weight (or not), and a backward that reads what was saved, under the same name."""

    def forward(shard, x):
        weight = gather(shard)
        return [x @ weight, weight.t() if keeps else shard]

    def backward(saved, tangent):
        return tangent @ (saved if keeps else gather(saved).t())

    a, _, x = shards(4)
    first = trace(forward, a, x)
    saved = first.graph.output_node().all_input_nodes[1]
    second = trace(backward, torch.ones(8, 8) if keeps else a, torch.ones(3, 8), graph="backward")
    taken, tangent = second.graph.find_nodes(op="placeholder")
    taken.name, tangent.meta["desc"] = saved.name, TangentAOTInput(PlainAOTOutput(0))
    return first, second


def test_estimates_see_a_kept_weight(fake4):
    assert (estimate(pair(True))["saved"], estimate(pair(False))["saved"]) == (256, 0)


def test_a_rise_is_stated(fake4):
    found = verdict(estimate(pair(False)), estimate(pair(True)))
    assert found.outcome is Outcome.PASS and "saved 0 to 256 bytes" in found.message
