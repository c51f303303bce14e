import torch
from graphs_by_hand import gather, shards, trace
from torch._functorch._aot_autograd.descriptors import PlainAOTOutput, TangentAOTInput

from workbench.graph.read.peak import estimated_bytes
from workbench.pipeline.report_text import memory_changes


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
    assert [estimated_bytes(*pair(keeps))["saved"] for keeps in (True, False)] == [256, 0]


def test_a_rise_is_stated(fake4):
    before, after = estimated_bytes(*pair(False)), estimated_bytes(*pair(True))
    assert "saved 0 to 256 bytes (estimated)" in memory_changes((before, after))
    assert memory_changes((before, before)) == memory_changes(None) == []
