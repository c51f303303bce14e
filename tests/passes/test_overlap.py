"""overlap_collectives: what moves, what must not, and that Inductor leaves the order as it is."""

from __future__ import annotations

import pytest
import torch
from on_ranks import FSDP_TP, small
from torch.fx import Graph, GraphModule

from workbench import World, author, capture, load_recipe, partition, run_joint, run_partitioned
from workbench.checks.verdicts import Outcome
from workbench.graph.read.collectives import exposed_in_node_order, list_collectives
from workbench.graph.read.timeline import Costs, costs_of, simulate
from workbench.passes.overlap_collectives import transform
from workbench.passes.overlap_collectives.transform import constraints, schedule
from workbench.recipe.sections import PassSpec

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


def hidden(code: str) -> int:
    """Collectives with a matmul between start and next wait, in the order of generated code."""
    started, count = 0, 0
    for line in code.splitlines():
        if "_c10d_functional.wait_tensor" in line:
            started = 0
        elif "_c10d_functional." in line and "=" in line:
            started += 1
        elif "extern_kernels.mm(" in line:
            count, started = count + started, 0
    return count


@pytest.mark.slow  # two compilations
def test_inductor_keeps_the_order_unless_told_otherwise(fake4, monkeypatch):
    import torch._inductor.config as config
    from torch._inductor.graph import GraphLowering

    generated, codegen = [], GraphLowering.codegen

    def noted(self):
        found = codegen(self)
        generated.append(str(getattr(found[0], "value", "")))
        return found

    monkeypatch.setattr(GraphLowering, "codegen", noted)
    recipe = load_recipe("llama3_full_inductor_block_bucketing_overlap_cudagraph").override({
        "mesh.dp_shard": 2, "mesh.tp": 2, "model.n_layers": 2})
    with config.patch(force_disable_caches=True):
        for keep in (True, False):
            with capture(author(recipe, fake4)) as joint:
                run_joint(joint, recipe.joint_passes)
                made = partition(joint)
            run_partitioned(made, [BLOCKS, OVERLAP, PassSpec(name="full_inductor_compilation",
                                                             options={"keep_order": keep})])
    kept, as_it_likes = hidden(generated[1]), hidden(generated[3])
    assert kept > as_it_likes
