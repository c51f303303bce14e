"""overlap_collectives: what moves, what must not, and that Inductor leaves the order as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._inductor.config as config
from on_ranks import FSDP_TP, small
from torch.fx import Graph, GraphModule

from workbench import (
    World,
    author,
    build,
    capture,
    load_recipe,
    partition,
    register_pass,
    run_partitioned,
)
from workbench.checks.verdicts import Outcome
from workbench.graph.read.collectives import exposed_in_node_order, list_collectives
from workbench.graph.read.kernels import find_kernels
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.order import products_between, products_between_calls
from workbench.graph.read.timeline import Costs, costs_of, simulate
from workbench.passes.overlap_collectives import transform
from workbench.passes.overlap_collectives.transform import constraints, schedule

pytestmark = pytest.mark.integration

BLOCKS, OVERLAP, aten = "transformer_block_bucketing", "overlap_collectives", torch.ops.aten
SIZES = {"model.n_layers": 2, "data.seq_len": 512, "data.batch_per_rank": 8, "model.dim": 512, "model.ffn_dim": 2048}


@pytest.fixture(scope="module")
def pairs(fake4):
    """Forward and backward, sizes at which matmuls are as long as collectives, and the records of the passes."""
    joint = capture(author(small(FSDP_TP).override(SIZES), fake4))

    def make(*specs):
        made = partition(joint.fork())
        return made, run_partitioned(made, specs)[0]

    return make


def tp_exposed(gm):
    return sum(c.axis == "tp" for c in exposed_in_node_order(gm))


@pytest.mark.parametrize("bucketing", [
    pytest.param((), marks=pytest.mark.slow), (BLOCKS,),
    pytest.param(("autobucketing_reordering",), marks=pytest.mark.slow),
], ids=str)
def test_less_is_exposed_and_every_node_is_still_there(pairs, bucketing):
    plain, _ = pairs(*bucketing)
    made, records = pairs(*bucketing, OVERLAP)
    assert records[-1].outcome is Outcome.PASS
    was, now = records[-1].verdict("effect").evidence["exposed_ms"]
    assert now < 0.8 * was
    for before, after in zip(plain.graphs, made.graphs, strict=True):
        assert sorted(n.name for n in before.graph.nodes) == sorted(n.name for n in after.graph.nodes)
        signatures = [[n.name for n in g.graph.nodes if n.op in ("placeholder", "output")] for g in (before, after)]
        assert signatures[0] == signatures[1]
    # in the backward, gradients of weights wait for no collective
    assert tp_exposed(made.backward) < tp_exposed(plain.backward)


def test_every_rank_finds_the_same_order(pairs):
    orders = [[n.name for g in pairs(BLOCKS, OVERLAP)[0].graphs for n in g.graph.nodes] for _ in range(2)]
    assert orders[0] == orders[1]


def test_a_short_horizon_moves_little(pairs):
    plain, _ = pairs(BLOCKS)

    def moved(horizon):
        costs = costs_of(plain.backward, "h100")
        order = schedule(plain.backward, costs, horizon)
        place = {n: i for i, n in enumerate(plain.backward.graph.nodes)}
        return max(abs(place[n] - i) for i, n in enumerate(order)), simulate(order, costs).exposed_ms

    (near, little), (far, most) = moved(0.01), moved(8.0)
    assert near < far and little > most


def test_nothing_to_move_is_no_effect(fake4):
    def on(mesh, world):
        return run_partitioned(partition(capture(author(small(mesh), world))), [OVERLAP])[0][0]

    assert on({"dp_shard": 4}, fake4).outcome is Outcome.PASS
    found = on({}, World("gloo", 1, 0, torch.device("cpu"))).verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT and found.message == "no collective is exposed, as estimated"


def test_what_has_its_best_order_already_is_left_alone(pairs):
    made, _ = pairs(BLOCKS, OVERLAP)
    before = [n.name for n in made.backward.graph.nodes]
    record = run_partitioned(made, [OVERLAP])[0][0]
    if record.verdict("effect").outcome is Outcome.NO_EFFECT:
        assert before == [n.name for n in made.backward.graph.nodes]
        assert record.verdict("effect").message == "no work is free to move behind what is exposed"
    else:
        was, now = record.verdict("effect").evidence["exposed_ms"]
        assert now < was


def by_hand():
    """x -> buffer, written twice through a view and read between; two random nodes that nothing else orders."""
    graph = Graph()
    x = graph.placeholder("x")
    buffer = graph.call_function(aten.empty.memory_format, ([4],))
    view = graph.call_function(aten.view.default, (buffer, [2, 2]))
    first = graph.call_function(aten.copy_.default, (buffer, x))
    read = graph.call_function(aten.sin.default, (view,))
    second = graph.call_function(aten.mul_.Tensor, (view, 2))
    again = graph.call_function(aten.cos.default, (buffer,))
    one = graph.call_function(aten.rand_like.default, (x,))
    two = graph.call_function(aten.bernoulli.default, (x,))
    graph.output((read, again, one, two, second, first))
    return GraphModule(torch.nn.Module(), graph), (first, read, second, again, one, two)


def test_writes_and_random_operators_keep_their_order():
    gm, (first, read, second, again, one, two) = by_hand()
    must = constraints(gm, Costs({}, {}, {}, {}))
    assert first in must[read] and {first, read} <= must[second] and second in must[again]
    assert one in must[two] and two not in must[one]


def test_without_the_marks_of_writes_a_read_would_overtake(monkeypatch):
    gm, (first, read, second, again, *_) = by_hand()
    monkeypatch.setattr(transform, "written_inputs", lambda node: [])
    must = constraints(gm, Costs({}, {}, {}, {}))
    assert first not in must[read] and second not in must[again]


def test_collectives_of_a_group_keep_their_order(pairs):
    plain, _ = pairs(BLOCKS)
    made, _ = pairs(BLOCKS, OVERLAP)
    for before, after in zip(plain.graphs, made.graphs, strict=True):
        orders = [[(c.group, c.node) for c in list_collectives(g)] for g in (before, after)]
        for group in {g for g, _ in orders[0]}:
            assert [n for g, n in orders[0] if g == group] == [n for g, n in orders[1] if g == group]


def dense_order(gm, example_inputs, *, options):
    """As many collectives as can be have a product behind them: one group's may change places with each other."""
    costs = costs_of(gm, "h100")
    costs = replace(costs, group={node: node.name for node in costs.group},
                    compute={node: ms * is_compute(node) for node, ms in costs.compute.items()})
    for node in schedule(gm, costs, 40.0):
        if node.op not in ("placeholder", "output"):
            gm.graph.output_node().prepend(node)
    return gm


def lowered(world, order, **options):
    """Collectives with a product between start and wait in the graphs, those of them that still have one in the code,
    and how many calls of libraries and collectives the code has."""
    recipe = load_recipe("llama3_full_inductor").override({
        "mesh.dp_shard": 2, "mesh.tp": 2, "model.n_layers": 4, "strict": False, "free_order": True,
        "passes": [BLOCKS, order, {"name": "full_inductor_compilation", **options}]})
    with config.patch(force_disable_caches=True):
        record = build(recipe, world).records[-1]
    placed = kept = calls = 0
    for graph, function in zip(record.before, record.after, strict=True):
        kernels = find_kernels(function, graph)
        before = [name for name, count in products_between(graph).items() if count]
        after = products_between_calls(kernels, graph)
        placed, kept = placed + len(before), kept + sum(after.get(name, 0) > 0 for name in before)
        calls += kernels.kinds["extern"] + kernels.kinds["collective"]
    return placed, kept, calls


@pytest.mark.slow  # two compilations each
@pytest.mark.parametrize("order", [OVERLAP, "dense_order"])
def test_inductor_keeps_the_order_of_the_graph_where_it_is_told_to(fake4, order):
    register_pass("dense_order", stage="partitioned")(dense_order)
    placed, kept, calls = lowered(fake4, order)
    _, lost, as_it_likes = lowered(fake4, order, keep_order=False)
    assert placed > 5 and kept >= 0.95 * placed > lost and calls == as_it_likes
