"""One notion of a gathered parameter: the chains that passes tag and the gathers that checks count are the same."""

import torch
from graphs_by_hand import DIM, gather, shards, trace
from torch._functorch._aot_autograd.descriptors import ParamAOTInput

from workbench.graph.gather_chains import gather_chains
from workbench.graph.read.memory import parameter_gathers


def both(gm):
    """The all-gathers of the chains, and those that memory counts; the first input is a parameter."""
    gm.graph.find_nodes(op="placeholder")[0].meta["desc"] = ParamAOTInput("weight")
    chained = [n for _, chain in gather_chains(gm) for n in chain if "all_gather" in str(n.target)]
    return chained, parameter_gathers(gm)


def uneven(shard):
    padded = torch.nn.functional.pad(shard, [0, 0, 0, 1])
    return gather(padded)[: DIM + 1]


def over_two_axes(shard):
    return gather(gather(shard)).view(-1, DIM)


def cut_along_columns(shard):
    return torch.cat(gather(shard.to(torch.bfloat16)).float().chunk(4), 1)


def test_chains_and_memory_see_the_same_gathers(fake4):
    def graph_of(weight):
        return trace(lambda shard, x: [weight(shard).sum() + x.sum()], *shards(4)[1:])

    for weight in (gather, uneven, over_two_axes, cut_along_columns):
        chained, counted = both(graph_of(weight))
        assert chained == counted != [], weight


def test_a_saved_activation_that_the_backward_gathers_is_no_parameter(fake4):
    """Sequence parallelism with checkpointing: a saved tensor has no descriptor."""
    def backward(shard, saved, tangent):
        return [tangent @ gather(shard).t(), torch.relu(gather(saved))]

    chained, counted = both(trace(backward, *shards(4), graph="backward"))
    assert chained == counted and len(counted) == 1
