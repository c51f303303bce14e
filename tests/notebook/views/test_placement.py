"""Placements that a graph can know: parameters' own, and what collectives beside a value say of their axis alone."""

import pytest
import torch
from graphs_by_hand import C10D, DIM, gather, group_name, shards, trace

from workbench.graph.facts import GraphFacts, set_facts
from workbench.notebook.views.placement import CUT, WHOLE, placement_of
from workbench.world.fake import fake_world


@pytest.fixture
def fake4():
    with fake_world(4) as world:  # which ends before the tour is built
        yield world


def by_hand(function, *inputs):
    gm = trace(function, *inputs)
    set_facts(gm, GraphFacts("forward", {"tp": group_name()}, {group_name(): 4}))
    return {node.name: placement_of(node) for node in gm.graph.nodes if node.op != "output"}


def reduced(x):
    return C10D.wait_tensor(C10D.all_reduce(x, "sum", group_name()))


def test_what_enters_and_leaves_an_all_gather(fake4):
    said = by_hand(lambda shard: [gather(shard).t()], shards(4)[0])
    assert next(iter(said.values())) == f"tp: {CUT}"
    assert said["wait_tensor"] == said["t"] == f"tp: {WHOLE}"


def test_what_enters_a_reduction_is_partial_and_a_product_after_it_is_not_guessed(fake4):
    said = by_hand(lambda x: [reduced(x * 2).exp()], torch.ones(4, DIM))
    assert said["mul"] == "tp: partial, to be reduced by sum" and said["wait_tensor"] == f"tp: {WHOLE}"
    assert said["exp"].startswith("unknown: no collective")


def test_a_part_of_what_is_whole_or_gathered_is_not_called_a_part_of_its_source(fake4):
    said = by_hand(lambda x: [reduced(x).chunk(4)[1].clone(), reduced(x)[1:2].clone()], torch.ones(4, DIM))
    for name in ("getitem_1", "clone", "slice_1", "clone_1"):
        assert said[name].startswith("unknown")
    said = by_hand(lambda x: [gather(x.exp().chunk(4)[1])], torch.ones(4, DIM))
    assert said["getitem_1"] == f"tp: {CUT}" and said["exp"].startswith("unknown")


def test_a_graph_without_a_mesh_says_so(fake4):
    gm = trace(lambda x: [x.exp()], torch.ones(2))
    gm.meta.clear()
    assert {placement_of(n) for n in gm.graph.nodes if n.op != "output"} == {"unknown: the graph names no mesh axis"}


def test_a_captured_graph_says_it_of_parameters_gradients_and_inputs(tour):
    nodes = [n for n in tour.captured.graph.nodes if n.op != "output"]
    said = {n.name: placement_of(n, lambda name: f"parts of {name}") for n in nodes}
    assert said["primals_1"] == "parts of tok_embeddings.weight"
    assert said["tangents_1"].startswith("unknown: no collective")
    gradients = [text for text in said.values() if text.startswith("gradient of")]
    assert len(gradients) == sum(n.op == "placeholder" and "ParamAOTInput" in str(n.meta["desc"])
                                 and isinstance(n.meta["val"], torch.Tensor) for n in nodes)
    assert all(f"dp_shard: {CUT}; tp: unknown" in text for text in gradients)
