"""Seeded faults: passes that the pipeline must catch. In a module of their own, since ranks import them."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import build_with, calls
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from workbench import WorkbenchError, build, current_world, facts_of
from workbench.torch_api.ops import collective_kind

GATHER = "_c10d_functional.all_gather_into_tensor"
SCATTER = "_c10d_functional.reduce_scatter_tensor"


def lost_output(gm):
    output = gm.graph.output_node()
    output.args = (list(output.args[0])[:-1],)
    return gm


def outputs_reversed(gm):
    output = gm.graph.output_node()
    output.args = (list(output.args[0])[::-1],)
    return gm


def none_for_an_output(gm):
    output = gm.graph.output_node()
    values = list(output.args[0])
    last = max(i for i, value in enumerate(values) if value is not None)
    output.args = ([*values[:last], None, *values[last + 1:]],)
    return gm


def output_without_arguments(gm):
    gm.graph.output_node().args = ()
    return gm


def empty_graph(gm):
    return GraphModule(gm, Graph())


def unknown_group(gm):
    for gather in calls(gm, GATHER)[:1]:
        gather.args = (*gather.args[:2], "nope")
    return gm


def without_metadata(gm):
    for node in gm.graph.nodes:
        node.meta = {}
    return gm


def edited_then_raises(gm):
    gm.graph.erase_node(gm.graph.output_node())
    facts_of(gm).groups["stray"] = "9"
    raise ValueError("no bucket fits")


def only_the_wait_is_tagged(gm):
    """The naive reshard: views of the gathered weight are saved in its stead."""
    for gather in calls(gm, GATHER):
        (wait,) = gather.users
        if wait.meta.get("partitioner_tag") != "is_backward":
            wait.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
    return gm


def swap_on_rank_1(gm):
    """Two gathers of different sizes start in the other order: on rank 1 alone, in the forward."""
    if dist.get_rank() == 1 and facts_of(gm).part == "forward":
        first, *others = calls(gm, GATHER)
        second = next(g for g in others if g.meta["val"].shape != first.meta["val"].shape)
        chain = [second]
        while chain[0].all_input_nodes[0].op != "placeholder":
            chain.insert(0, chain[0].all_input_nodes[0])
        for node in chain:
            first.prepend(node)
    return gm


def has_values(tensor):
    return type(tensor) is torch.Tensor and tensor.device.type != "meta" and not torch._is_functional_tensor(tensor)


def started_collectives(recipe):
    """The error of the build, and how many collectives of the graph ran before it."""
    ran = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            values = [a for a in args if isinstance(a, torch.Tensor)]
            if collective_kind(func) and all(map(has_values, values)):
                ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        with pytest.raises(WorkbenchError) as refused:
            build_with(recipe, "swap", swap_on_rank_1, stage="partitioned")
        before = list(ran)
        build(recipe, current_world(), level="full")  # and one that is let through runs them, so they would be seen
    return str(refused.value), before, len(ran)
