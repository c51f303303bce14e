"""Buckets from one trace are what a trace of each gives, with memory of their own."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
from graph.test_stamping import face, storages
from on_ranks import FSDP_TP, small
from torch._inductor.fx_passes import bucketing as inductor
from torch.fx.node import map_arg

from workbench.authoring.author import author
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.pipeline.run_passes import run_partitioned
from workbench.torch_api.inductor import bucketing, fast_bucketing
from workbench.world.fake import fake_world

NOT_COMPARED = {"val", "eager_input_vals", "from_node", "seq_nr", "desc", "original_aten"}


@pytest.fixture(scope="module")
def pair():
    with fake_world(4) as world:
        yield partition(capture(author(small(FSDP_TP, layers=3), world)))


def each_node(graph):
    place = {n: i for i, n in enumerate(graph.nodes)}
    for n in place:
        yield (n.name, n.op, n.target, map_arg((n.args, n.kwargs), place.__getitem__), face(n.meta.get("val")),
               sorted(n.meta), {k: str(v) for k, v in n.meta.items() if k not in NOT_COMPARED},
               [(s.name, s.pass_name, s.action) for s in n.meta.get("from_node", [])])


def bucketed(pair):
    """Both graphs behind transformer_block_bucketing, by node and by memory; and how many traces that took."""
    trace, traces = inductor._trace, []

    def counted(*args):
        traces.append(args)
        return trace(*args)

    other = pair.fork()
    with mock.patch.object(inductor, "_trace", counted):
        run_partitioned(other, ["transformer_block_bucketing"])
    return [[*each_node(g.graph)] for g in other.graphs], [storages(g.graph) for g in other.graphs], len(traces)


def nothing(*_, **__):
    return contextlib.nullcontext()


def test_node_for_node_what_a_trace_of_each_gives_with_every_table_and_no_cache(pair):
    nodes, memory, few = bucketed(pair)
    with mock.patch.object(bucketing, "faster", nothing):
        every = bucketed(pair)
    assert (nodes, memory) == every[:2]
    assert few <= every[2] - 4  # of three alike blocks one is traced: forward, backward, and their gradients


def test_buckets_that_share_memory_would_be_seen(pair):
    memory = bucketed(pair)[1]
    with mock.patch.object(fast_bucketing, "_give_own_values", lambda *_: None):
        assert bucketed(pair)[1] != memory
