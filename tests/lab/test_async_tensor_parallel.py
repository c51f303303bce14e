"""async_tensor_parallel: what torch's pass takes and leaves, who can run it, and the values."""

import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
from graphs_by_hand import gather, group_name, scatter, trace
from on_ranks import FSDP_TP, build_with, calls, outcomes, small, user_pass
from two_operators import as_two_operators

from workbench import Options, author, capture, fake_world, partition, run_joint, run_partitioned
from workbench.graph.facts import GraphFacts, set_facts
from workbench.graph.read.collectives import exposed_in_node_order, list_collectives
from workbench.graph.read.cost import flops
from workbench.graph.read.simulated_run import COMPUTE, simulated
from workbench.graph.read.timeline import not_hidden
from workbench.lab.async_tensor_parallel.transform import async_tensor_parallel, eligible, fuse, fused_with_products
from workbench.pipeline.run_passes import copy_graph
from workbench.torch_api.distributed import symmetric_memory
from workbench.torch_api.ops import multiplies

NAME, TP2, OPTIONS = "async_tensor_parallel", {"tp": 2}, Options()


@pytest.fixture(scope="module")
def fake2():
    with fake_world(2) as world:
        yield world


@pytest.fixture(scope="module")
def captured(fake2):
    """The joint graph of llama3 on tp 2, captured once for each set of changes."""
    return cache(lambda *changes: capture(author(small(TP2).override(dict(changes)), fake2)))


@pytest.mark.integration
@pytest.mark.parametrize(("joint", "passes", "changes", "fused"), [
    (["inductor_decomposition"], [NAME], {"precision.param": "bfloat16", "data.batch_per_rank": 3}, 8),
    ([], ["graph_cleanup", NAME], {}, 3),  # which merges the views that torch's pass looks for
], ids=["decomposed", "cleaned up"])
def test_most_collectives_beside_products_share_an_operator(captured, joint, passes, changes, fused):
    step = captured(*changes.items()).fork()
    run_joint(step, joint)
    pair = partition(step)
    record = run_partitioned(pair, passes)[0][-1]
    effect = record.verdict("effect")
    assert effect.outcome == "UNKNOWN" and "a fake world has none" in effect.message
    assert effect.evidence == {"fused": fused, "eligible": 10, "without_a_product": 7}
    assert [record.verdict(check).outcome for check in ("lint", "collectives")] == ["PASS"] * 2
    # no product is lost, and none is computed twice
    assert [sum(flops(gm).values()) for gm in record.before] == [sum(flops(gm).values()) for gm in record.after]
    for gm in pair.graphs:
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        assert all("val" in node.meta and "partitioner_tag" in node.meta for node in nodes)


def on_tp(gm, world="fake"):
    set_facts(gm, GraphFacts("forward", {"tp": group_name()}, {group_name(): dist.get_world_size()}, world))
    return gm


def two_products(x, w):
    return gather(x) @ w


def effect_on(function, world):
    gm = on_tp(trace(function, torch.empty(4, 4), torch.empty(4, 4)), world)
    return fused_with_products((gm,), (async_tensor_parallel(copy_graph(gm), [], options=OPTIONS),), OPTIONS)


def test_the_effect_counts_what_was_fused_and_says_why_not(fake2):
    for function, world, happened, why in [
        (two_products, "fake", None, "1 of 1 .* a fake world has none"),
        (lambda x, w: w @ gather(x).t(), "fake", False, "0 of 1 "),
        (lambda x, w: scatter(x @ w + x @ w.t()), "fake", False, "0 of 1 "),
        (lambda x, w: gather(x).sin() + gather(w), "fake", False, "0 of 0 "),
        (torch.add, "fake", False, "set mesh.tp to 2 or more"),
        (two_products, "gloo", False, "0 of 1 .* CPUs over gloo"),
    ]:
        effect = effect_on(function, world)
        assert effect.happened is happened and re.search(why, effect.reason), (why, world)


def test_gpus_must_read_each_others_memory(fake2, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for devices, readable, why in [([("a", 0), ("a", 1)], True, ""), ([("a", 0), ("b", 0)], True, "on 2 hosts, a, b"),
                                   ([("a", 0), ("a", 1)], False, "no peer-to-peer access")]:
        def share(answers, value, group, devices=devices):
            answers[:] = devices if isinstance(value, tuple) else ["", value]

        reserved = {}
        monkeypatch.setattr(dist, "all_gather_object", share)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b, readable=readable: readable)
        monkeypatch.setattr(symmetric_memory, "reserve", reserved.__setitem__)
        effect = effect_on(lambda x, w: scatter(gather(x) @ w), "nccl")
        assert effect.happened is (not why) and why in effect.reason
        assert reserved == ({} if why else {group_name(): 2 * 4 * 4 * 4})  # two of what is scattered


def test_a_fused_operator_hides_itself_and_costs_its_products(fake2):
    gm = on_tp(trace(lambda x, w: scatter(gather(x) @ w), torch.empty(512, 256), torch.empty(256, 128)))
    plain = copy_graph(gm)
    fuse(gm, group_name(), on_gpus=False)
    (both,) = (n for n in gm.graph.nodes if multiplies(n.target))
    assert sum(flops(gm).values()) == sum(flops(plain).values()) == 2 * 1024 * 256 * 128
    sent = [[(c.kind, c.payload) for c in list_collectives(g)] for g in (plain, gm)]
    assert sent[0] == sent[1]
    assert [c.kind for c in exposed_in_node_order(gm)] == ["all_gather"]  # the product stands in one operator
    spans = [s for s in simulated(gm).spans if s.name == both.name]
    assert len(spans) == 2 and spans[0].lane == COMPUTE and spans[0].ms > 0
    assert not_hidden(3.0, 1.0, 2) == 2.5 and not_hidden(1.0, 3.0, 2) == 0.5 and not_hidden(1.0, 0.0, 2) == 1.0


def fuse_all(gm):
    """What the pass does, on ranks without GPUs."""
    for group in {c.group for c in eligible(gm)}:
        fuse(gm, group, on_gpus=False)
    return gm


def wrong_factor(gm):
    """A fault: two products of one gathered value, wk's and wv's or w1's and w3's, are exchanged."""
    for node in calls(gm, "symm_mem.fused_all_gather_matmul"):
        *others, last = node.args[1]
        node.args = (node.args[0], [*others[:-1], last, *others[-1:]], *node.args[2:])
    return gm


def with_values(mesh):
    contract = {"stage": "partitioned", "numerics": "reduction_order"}
    with as_two_operators("CPU"), user_pass("fused", fuse_all, **contract) as name:
        built = build_with(small(mesh, passes=(name,)), "wrong", wrong_factor, **contract)
        assert sum(multiplies(n.target) for gm in built.records[0].after for n in gm.graph.nodes) == 8
        verdicts = outcomes(built, name)
        built.step.close()
    assert {outcome for outcome, _ in verdicts.values()} == {"PASS"} and "numerics" in verdicts
    assert outcomes(built, "wrong")["numerics"][0] == "FAIL"


@pytest.mark.integration
@pytest.mark.parametrize(("pool", "mesh"), [
    ("pool2", TP2), pytest.param("pool4", FSDP_TP, marks=pytest.mark.nightly)], indirect=["pool"], ids=str)
def test_the_values_are_those_of_the_plain_graph_and_an_exchange_is_found(pool, mesh):
    pool.run(with_values, mesh)
