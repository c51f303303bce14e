"""overlap_collectives: what moves, what must not, and that Inductor leaves the order as it is."""

from contextlib import nullcontext

import pytest
import torch
import torch._inductor.config as config
from graphs_by_hand import trace
from on_ranks import FSDP_TP, small
from torch.fx import Graph, GraphModule

from workbench import author, build, capture, load_recipe, partition, run_partitioned
from workbench.checks.verdicts import Outcome
from workbench.graph.list_schedule import constraints, schedule
from workbench.graph.read.collectives import exposed_in_node_order
from workbench.graph.read.timeline import costs_of, simulate
from workbench.passes.overlap_collectives import OverlapOptions, less_exposed
from workbench.torch_api.inductor import kept_order, lowering

pytestmark = pytest.mark.integration

BLOCKS, OVERLAP, aten = "transformer_block_bucketing", "overlap_collectives", torch.ops.aten
SIZES = {"data.seq_len": 512, "data.batch_per_rank": 8, "model.dim": 512, "model.ffn_dim": 2048}


@pytest.fixture(scope="module")
def pairs(fake4):
    """Forward and backward with buckets, and with overlap behind these, and its record.

    Sizes at which matmuls are as long as collectives.
    """
    plain = partition(capture(author(small(FSDP_TP).override(SIZES), fake4)))
    run_partitioned(plain, [BLOCKS])
    made = plain.fork()
    return plain, made, run_partitioned(made, [OVERLAP])[0][0]


def tp_exposed(gm):
    return sum(c.axis == "tp" for c in exposed_in_node_order(gm))


def test_less_is_exposed_and_every_node_is_still_there(pairs):
    plain, made, record = pairs
    assert record.outcome is Outcome.PASS
    was, now = record.verdict("effect").evidence["exposed_ms"]
    assert now < 0.8 * was
    for before, after in zip(plain.graphs, made.graphs, strict=True):
        assert sorted(n.name for n in before.graph.nodes) == sorted(n.name for n in after.graph.nodes)
        signatures = [[n.name for n in g.graph.nodes if n.op in ("placeholder", "output")] for g in (before, after)]
        assert signatures[0] == signatures[1]
    # in the backward, gradients of weights wait for no collective
    assert tp_exposed(made.backward) < tp_exposed(plain.backward)
    assert less_exposed(made.graphs, made.graphs, OverlapOptions()).reason == (
        "no work is free to move behind what is exposed")


def test_a_short_horizon_moves_little(pairs):
    plain, _, _ = pairs

    def moved(horizon):
        costs = costs_of(plain.backward, "h100")
        order = schedule(plain.backward, costs, horizon)
        place = {n: i for i, n in enumerate(plain.backward.graph.nodes)}
        return max(abs(place[n] - i) for i, n in enumerate(order)), simulate(order, costs).exposed_ms

    (near, little), (far, most) = moved(0.01), moved(8.0)
    assert near < far and little > most


def test_nothing_to_move_is_no_effect(fake4):
    gm = trace(lambda x: [x @ x], torch.ones(4, 4))
    effect = less_exposed((gm,), (gm,), OverlapOptions())
    assert not effect.happened and effect.reason == "no collective is exposed, as estimated"


def test_writes_and_random_operators_keep_their_order():
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
    must = constraints(GraphModule(torch.nn.Module(), graph))
    assert first in must[read] and {first, read} <= must[second] and second in must[again]
    assert one in must[two] and two not in must[one]


@pytest.mark.nightly
@pytest.mark.parametrize("anything_fuses", [False, True])
def test_no_fusion_delays_a_gradients_collective_behind_later_products(fake4, anything_fuses, monkeypatch):
    """In a whole step of one layer, the sums of all norms' gradients read alike enough to become one late kernel.

    They do where Inductor computes what the forward saves wherever it is read.
    """
    monkeypatch.setattr(lowering, "compute_once", lambda *_: None)
    if anything_fuses:
        monkeypatch.setattr(kept_order, "kept_fusions", nullcontext)
    recipe = load_recipe("llama3_whole_step").override({
        "mesh.dp_shard": 4, "mesh.tp": 1, "model.n_layers": 1, "strict": False,
        "passes": [OVERLAP, "full_inductor_compilation"]})
    with config.patch(force_disable_caches=True):
        found = build(recipe, fake4).records[-1].verdict("order")
    assert found.outcome is (Outcome.FAIL if anything_fuses else Outcome.PASS)
    assert found.evidence["hidden"] > 5 and bool(found.evidence["lost"]) is anything_fuses
