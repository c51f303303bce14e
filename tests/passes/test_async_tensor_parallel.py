"""async_tensor_parallel: which collectives share an operator with products, why others do not, and the values."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from graphs_by_hand import C10D, gather, group_name, scatter, trace
from on_ranks import FSDP_TP, build_with, calls, outcomes, small

from workbench import author, build, capture, fake_world, partition, run_joint, run_partitioned
from workbench.checks.verdicts import Outcome
from workbench.graph.facts import GraphFacts, facts_of, set_facts
from workbench.graph.products.beside_collectives import beside_products
from workbench.graph.products.fuse import added_bytes, fuse, workspace_bytes
from workbench.graph.read.collectives import exposed_in_node_order, list_collectives
from workbench.graph.read.cost import flops, node_flops
from workbench.graph.read.simulated_run import COMPUTE, simulated
from workbench.graph.read.timeline import not_hidden
from workbench.lab.async_tensor_parallel import AsyncTensorParallelOptions
from workbench.lab.async_tensor_parallel.transform import async_tensor_parallel, fused_with_products
from workbench.pipeline.run_passes import copy_graph
from workbench.recipe.sections import PassSpec
from workbench.torch_api.distributed.symmetric_memory import as_two_operators
from workbench.torch_api.ops import multiplies
from workbench.world.mesh import current_world

NAME, TP2 = "async_tensor_parallel", {"tp": 2}
ALL = PassSpec(name=NAME, options={"choose": "all"})
SCATTER, GATHER = "symm_mem.fused_matmul_reduce_scatter", "symm_mem.fused_all_gather_matmul"


@pytest.fixture(scope="module")
def fake2():
    with fake_world(2) as world:
        yield world


@pytest.fixture(scope="module")
def captured(fake2):
    """The joint graph of llama3 on tp 2, in one precision or another, captured once."""
    return cache(lambda *changes: capture(author(small(TP2, layers=2).override(dict(changes)), fake2)))


def ran(captured, *passes, joint=(), **changes):
    """Forward and backward, and the record of the last pass."""
    made = captured(*changes.items()).fork()
    run_joint(made, joint)
    pair = partition(made)
    return pair, run_partitioned(pair, passes)[0][-1]


@pytest.mark.integration
@pytest.mark.parametrize("joint", [(), ("inductor_decomposition",)], ids=["as captured", "decomposed"])
@pytest.mark.parametrize("changes", [{}, {"precision.param": "bfloat16", "data.seq_len": 2048}], ids=str)
def test_every_collective_beside_products_shares_an_operator(captured, joint, changes):
    pair, record = ran(captured, "graph_cleanup", ALL, joint=joint, **changes)
    found = record.verdict("effect")
    assert found.outcome is Outcome.UNKNOWN and "a fake world has none" in found.message
    assert found.evidence["fused"] == found.evidence["eligible"] == 18 and not found.evidence["missed"]
    assert found.evidence["without_a_product"] == 9  # of the embedding, of norms' weights and of the loss
    was, now = found.evidence["tp_exposed_ms"]
    assert now < was
    assert [record.verdict(check).outcome for check in ("lint", "collectives")] == [Outcome.PASS] * 2
    assert [len(calls(gm, SCATTER)) for gm in pair.graphs] == [4, 5]
    assert [len(calls(gm, GATHER)) for gm in pair.graphs] == [5, 4]
    # no product is lost, and none is computed twice
    assert [sum(flops(gm).values()) for gm in record.before] == [sum(flops(gm).values()) for gm in record.after]
    sizes = [workspace_bytes(each) for gm in record.before for each in beside_products(gm)]
    assert found.evidence["workspace_bytes"] == max(sizes)


def on_tp(gm, world="fake"):
    set_facts(gm, GraphFacts("forward", {"tp": group_name()}, {group_name(): dist.get_world_size()}, world))
    return gm


def shapes(*sizes):
    return [torch.empty(size) for size in sizes]


def turned(x, w):
    return w @ gather(x).t()


def depends(x):
    whole = gather(x)
    return whole @ (whole.t() @ whole)


def columns(x, w):
    return torch.cat(gather(x).split(4), 1) @ w


def one_term_is_no_product(x, y, w):
    return scatter(x @ w + y)


def read_elsewhere(x, w):
    return scatter(out := x @ w), out.sin()


def by_max(x, w):
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x @ w, "max", 2, group_name()))


def scatters_columns(x, w):
    return scatter(torch.cat((x @ w).split(4, 1)))


MISSES = [
    (turned, [(4, 4), (4, 4)], "transposed or as their second factor only"),
    (depends, [(4, 4)], "depends on the result of the all-gather"),
    (columns, [(4, 4), (8, 4)], "gathers the dimension that the products sum over"),
    (one_term_is_no_product, [(8, 4), (8, 4), (4, 4)], "a sum of 2 terms, and 1 of them are no products"),
    (read_elsewhere, [(8, 4), (4, 4)], "mm is read by others, too"),
    (by_max, [(8, 4), (4, 4)], "reduces by max"),
    (scatters_columns, [(4, 8), (8, 8)], "scatters the columns of the product"),
]


@pytest.mark.parametrize(("function", "sizes", "why"), MISSES, ids=[m[0].__name__ for m in MISSES])
def test_each_miss_has_its_reason(fake2, function, sizes, why):
    gm = on_tp(trace(function, *shapes(*sizes)))
    before = str(gm.graph)
    (found,) = beside_products(gm)
    assert why in found.missed
    after = async_tensor_parallel(gm, [], options=AsyncTensorParallelOptions(choose="all"))
    assert str(after.graph) == before
    effect = fused_with_products((gm,), (after,), AsyncTensorParallelOptions(choose="all"))
    assert effect.happened is False and why in effect.reason and effect.evidence["fused"] == 0


def test_what_hides_less_than_it_costs_is_left(fake2):
    def wide(x, w):
        return torch.cat(gather(x).split(4), 1) @ w

    gm = on_tp(trace(wide, torch.empty(4, 1, 8), torch.empty(8, 4096)))
    (found,) = beside_products(gm)
    assert (found.missed, found.dim, found.rows) == ("", 1, 4)
    assert added_bytes(found) > 0
    effect = fused_with_products((gm,), (async_tensor_parallel(gm, [], options=AsyncTensorParallelOptions()),),
                         AsyncTensorParallelOptions())
    assert effect.happened is False and "would take longer than what they hide" in effect.reason


def test_without_products_or_an_axis_it_says_so(fake2):
    for function, told in ((gather, "0 of 0"), (torch.sin, "set mesh.tp to 2 or more")):
        gm = on_tp(trace(function, torch.empty(4, 4)))
        effect = fused_with_products((gm,), (gm,), AsyncTensorParallelOptions())
        assert effect.happened is False and told in effect.reason


@pytest.mark.parametrize("world", ["gloo", "one process", "simulated"])
def test_ranks_without_gpus_keep_their_graph(fake2, world):
    gm = on_tp(trace(lambda x, w: gather(x) @ w, *shapes((4, 4), (4, 4))), world)
    before = str(gm.graph)
    assert str(async_tensor_parallel(gm, [], options=AsyncTensorParallelOptions(choose="all")).graph) == before
    effect = fused_with_products((gm,), (gm,), AsyncTensorParallelOptions(choose="all"))
    assert effect.happened is False and "read each other's memory" in effect.reason and world in effect.reason


@pytest.mark.parametrize(("devices", "readable", "why"), [
    ([("a", 0), ("a", 1)], True, ""), ([("a", 0), ("b", 0)], True, "on 2 hosts, a, b"),
    ([("a", 0), ("a", 1)], False, "no peer-to-peer access"),
])
def test_gpus_must_read_each_others_memory(fake2, monkeypatch, devices, readable, why):
    def told(answers, value, group):
        answers[:] = devices if isinstance(value, tuple) else ["", value]

    monkeypatch.setattr(dist, "all_gather_object", told)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: readable)
    gm = on_tp(trace(lambda x, w: gather(x) @ w, *shapes((4, 4), (4, 4))), "nccl")
    monkeypatch.setattr("workbench.torch_api.distributed.symmetric_memory.reserve", lambda group, size: None)
    options = AsyncTensorParallelOptions(choose="all")
    effect = fused_with_products((gm,), (async_tensor_parallel(copy_graph(gm), [], options=options),), options)
    assert effect.happened is (not why) and why in effect.reason
    assert effect.evidence["fused"] == (not why)


def test_a_fused_operator_hides_itself_and_costs_its_products(fake2):
    gm = on_tp(trace(lambda x, w: scatter(gather(x) @ w), *shapes((512, 256), (256, 128))))
    plain = copy_graph(gm)
    fuse(gm, beside_products(gm)[:1])
    (both,) = (n for n in gm.graph.nodes if multiplies(n.target))
    assert node_flops(both) == sum(map(node_flops, calls(plain, "aten.mm"))) == 2 * 1024 * 256 * 128
    sent = [[(c.kind, c.payload) for c in list_collectives(g)] for g in (plain, gm)]
    assert sent[0] == sent[1]
    assert [c.kind for c in exposed_in_node_order(gm)] == ["reduce_scatter"]
    spans = [s for s in simulated(gm).spans if s.name == both.name]
    assert len(spans) == 2 and spans[0].lane == COMPUTE and spans[0].ms > 0
    assert not_hidden(3.0, 1.0, 2) == 2.5 and not_hidden(1.0, 3.0, 2) == 0.5 and not_hidden(1.0, 0.0, 2) == 1.0


def fuse_all(gm):
    """What the pass does, on ranks without GPUs."""
    fuse(gm, [each for each in beside_products(gm) if not each.missed])
    return gm


def with_values(mesh):
    with as_two_operators("CPU"):
        built = build_with(small(mesh), "fuse_all", fuse_all, stage="partitioned", numerics="reduction_order")
        fused = sum(multiplies(n.target) for gm in built.records[-1].after for n in gm.graph.nodes)
        found = outcomes(built, "fuse_all")
        built.step.close()
    return fused, found


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [TP2, pytest.param(FSDP_TP, marks=pytest.mark.nightly)], ids=str)
def test_the_values_are_those_of_the_plain_graph(request, mesh):
    pool = request.getfixturevalue("pool2" if mesh is TP2 else "pool4")
    for fused, found in pool.run(with_values, mesh):
        assert fused == 10 and {outcome for outcome, _ in found.values()} == {"PASS"} and "numerics" in found


def wrong_order(gm):
    """A fault: the second factors of a sum are concatenated in another order than the first ones."""
    fuse_all(gm)
    for node in calls(gm, SCATTER):
        if node.args[1].target is torch.ops.aten.cat.default:
            node.args[1].args = (node.args[1].args[0][::-1], 0)
    return gm


def wrong_values():
    with as_two_operators("CPU"):
        built = build_with(small(TP2), "wrong_order", wrong_order, stage="partitioned", numerics="reduction_order")
        found = outcomes(built, "wrong_order")
        built.step.close()
    return found["numerics"][0]


def test_factors_in_another_order_are_found(pool2):
    assert pool2.run(wrong_values) == ["FAIL", "FAIL"]


def on_gloo():
    built = build(small(TP2, passes=(NAME,)).override({"strict": False}), current_world())
    found = outcomes(built, NAME)["effect"]
    part = facts_of(built.records[-1].after[0]).world
    built.step.close()
    return found, part


def test_a_recipe_on_gloo_says_why_nothing_happened(pool2):
    for (outcome, message), world in pool2.run(on_gloo):
        assert outcome == "NO_EFFECT" and "CPUs over gloo" in message and world == "gloo"
