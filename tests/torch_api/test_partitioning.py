"""What our settings around torch's partitioner change: the time alone, and no node."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from on_ranks import FSDP_TP, small
from torch._functorch import partitioners
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from workbench.authoring.author import author
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.pipeline.run_passes import run_joint
from workbench.torch_api import fast_partition, partitioning
from workbench.world.fake import fake_world


def patched():
    return partitioners.has_recomputable_rng_ops, getattr(*fast_partition.CUT), torch.fx.Graph.node_copy


as_torch_does = patched()


@pytest.fixture(scope="module")
def joint():
    recipe = small(FSDP_TP, ("activation_checkpointing", "reshard_after_forward"), layers=2)
    with fake_world(4) as world:
        joint = capture(author(recipe, world))
        run_joint(joint, recipe.joint_passes)
        yield joint


def plainly(joint, by):
    """Only the decision that torch takes otherwise is left."""
    def settings(joint=None):
        return mock.patch.object(partitioners, "has_recomputable_rng_ops", partitioning.recomputes_draws)

    with mock.patch.object(partitioning, "settings", settings):
        return partition(joint.fork(), by)


def each_node(pair):
    for graph in pair.graphs:
        place = {n: i for i, n in enumerate(graph.graph.nodes)}
        for n in place:
            yield n.name, n.op, n.target, n.type, map_arg((n.args, n.kwargs), place.__getitem__), list(n.meta)
            for key, value in n.meta.items():  # each has the very value of the joint graph's node
                yield id(value) if key in ("val", "nn_module_stack", "desc") and n.op != "output" else None
        yield graph.code


@pytest.mark.parametrize("by", ["min_cut", "default"])
def test_every_node_is_as_torch_makes_it(joint, by):
    ours, theirs = (list(each_node(pair)) for pair in (partition(joint.fork(), by), plainly(joint, by)))
    assert len(ours) > 1000
    assert ours == theirs


def test_another_cut_would_be_seen(joint):
    def nearest(graph, source, sink):
        before = fast_partition._tied(graph.adj, source)  # nothing is computed again that may be saved
        return 0, (before, set(graph) - before)

    with mock.patch.object(fast_partition, "minimum_cut", nearest):
        other = partition(joint.fork())
    assert list(each_node(other)) != list(each_node(partition(joint.fork())))


def test_no_code_is_written_that_nobody_reads(joint):
    pair = partition(joint.fork())
    assert all(isinstance(graph, _LazyGraphModule) and graph._needs_recompile() for graph in pair.graphs)
    assert not any(graph._needs_recompile() for graph in plainly(joint, "min_cut").graphs[1:]
                   if isinstance(graph, _LazyGraphModule))


def test_torch_is_left_as_it_was(joint):
    with partitioning.settings():
        assert getattr(*fast_partition.CUT) is fast_partition.minimum_cut
    assert patched() == as_torch_does


def test_an_alias_may_be_computed_again_and_a_detach_may_not(joint):
    found = {str(n.target): partitioning.repeatable(n) for n in joint.graph.graph.nodes if n.op == "call_function"}
    assert not found["aten.detach.default"] and not found["aten.mm.default"]
    assert found["aten.mul.Tensor"] and found["aten.view.default"]
