"""Patterns on a captured llama3: found and replaced before decomposition and after, metadata and bits kept."""

import re

import pytest
import torch
from on_ranks import calls, small, user_pass

from workbench import Outcome, WorkbenchError, World, author, capture, compile_step, partition
from workbench.graph.patterns import find_nodes, replace_pattern
from workbench.graph.read.nodes import provenance
from workbench.pipeline.run_passes import run_joint
from workbench.torch_api import aot
from workbench.torch_api.ops import short_name, storage_key

pytestmark = pytest.mark.integration

OWN = {"val", "tensor_meta", "desc"}
VIEWS = {"view", "_unsafe_view"}


def gated(x, y):
    s = torch.nn.functional.silu(x)
    return s, s * y


def gated_the_other_way(x, y):
    s = torch.nn.functional.silu(x)
    return s, y * s


def turned_twice(x):
    return x.t().t()


def left_alone(x):
    return x


@pytest.fixture(scope="module")
def joint(fake4):
    """The capture of two layers on dp_shard 2 x tp 2: tests take forks."""
    return capture(author(small({"dp_shard": 2, "tp": 2}, layers=2), fake4))


@pytest.fixture(scope="module")
def joints(joint):
    """The joint graph as captured, and decomposed."""
    fork = joint.fork()
    run_joint(fork, ["inductor_decomposition"])
    return {"captured": joint.graph, "decomposed": fork.graph}


@pytest.mark.compat
def test_find_by_operator_module_and_line(joints):
    gm = joints["captured"]
    assert find_nodes(gm, op="silu") == find_nodes(gm, op="aten.silu.default") == calls(gm, "aten.silu")
    assert find_nodes(gm, op=torch.ops.aten.silu) == find_nodes(gm, op=torch.ops.aten.silu.default) != []
    one, every = (find_nodes(gm, op="mm", module=path) for path in ("layers.1.feed_forward", "layers.*.feed_forward"))
    assert len(one) == 9 and len(every) == 18 and set(one) < set(every)
    assert find_nodes(gm, module="layers.*.feed") == []
    backward = find_nodes(gm, op="*silu*", module="layers.1")
    assert [n.meta["partitioner_tag"] for n in backward] == ["is_forward", "is_backward"]
    place = provenance(backward[0]).place
    there = find_nodes(gm, line=place)
    assert set(backward) < set(there) and {provenance(n).place for n in there} == {place}
    assert find_nodes(gm, op="silu", line=place) == calls(gm, "aten.silu")
    with pytest.raises(WorkbenchError, match="expected a file and a line, such as 'llama3.py:98'"):
        find_nodes(gm, line="layers.py")


@pytest.mark.parametrize(("kind", "nodes"), [("captured", 4), ("decomposed", 10)])
def test_new_nodes_have_the_metadata_of_those_they_replace(joints, kind, nodes):
    graph = aot.clone(joints[kind])
    found = replace_pattern(graph, gated, gated_the_other_way)
    assert found.count == 2 and len(found.nodes) == nodes
    graph.graph.lint()
    old = {n.name: n for n in joints[kind].graph.nodes}
    products = [n for n in found.nodes if n.target is torch.ops.aten.mul.Tensor]
    for new in products:  # the first input is now the second
        before = next(n for n in old.values() if n.target is new.target and n.meta.get("seq_nr") == new.meta["seq_nr"])
        assert {k: v for k, v in new.meta.items() if k not in OWN} == {
            k: v for k, v in before.meta.items() if k not in OWN}
        assert [a.name for a in reversed(new.args)] != [a.name for a in new.args]
    for new in found.nodes:
        assert new.meta["partitioner_tag"] == "is_forward" and "feed_forward" in str(new.meta["nn_module_stack"])
        assert new.meta["stack_trace"] and new.meta["val"].shape == (2, 16, 192)


def test_in_the_backward(joints):
    gm = aot.clone(joints["captured"])
    before = len(gm.graph.nodes)
    found = replace_pattern(gm, turned_twice, left_alone)  # in both directions, without new nodes
    assert found and found.nodes == () and len(gm.graph.nodes) == before - 2 * found.count
    assert replace_pattern(gm, turned_twice, left_alone).count == 0
    found = replace_pattern(gm, lambda g, x: torch.ops.aten.silu_backward(g, x),
                            lambda g, x: torch.ops.aten.silu_backward(g * 1.0, x))
    assert found.count == 2 and len(found.nodes) == 4
    for node in found.nodes:
        assert node.meta["partitioner_tag"] == "is_backward" and node.meta["fwd_nn_module_stack"]


def test_views_of_a_new_value_share_its_storage(joints):
    gm = aot.clone(joints["captured"])
    mm = next(n for n in find_nodes(gm, op="mm") if any(short_name(u) in VIEWS for u in n.users))
    shape = [n.meta["val"] for n in mm.args]
    found = replace_pattern(gm, lambda a, b: a @ b, lambda a, b: torch.mm(a, b).clone(), shape)
    fresh = next(n for n in found.nodes if n.target is torch.ops.aten.clone.default)
    assert "original_aten" in mm.meta and "original_aten" not in fresh.meta  # a clone is no part of a matmul
    views = [u for u in fresh.users if short_name(u) in VIEWS]
    assert views and all(storage_key(v.meta["val"]) == storage_key(fresh.meta["val"]) for v in views)


def test_what_nearly_matches_is_said(joints):
    graph = aot.clone(joints["decomposed"])
    said = replace_pattern(graph, lambda x, y: torch.nn.functional.silu(x) * y, lambda x, y: y)
    assert said.count == 0 and not said
    assert "2 places but for this: " in said.near_miss and "is read outside, by " in said.near_miss
    assert "the graph has no aten.tan.default" in repr(replace_pattern(graph, lambda x: x.tan(), lambda x: x.sin()))
    gm, cube = aot.clone(joints["captured"]), torch.empty(2, 3, 4, 5)
    found = replace_pattern(gm, lambda x: x.transpose(3, 1), lambda x: x.transpose(1, 3), [cube])
    assert found.count == 0 and "or with other numbers in arguments" in found.near_miss
    assert replace_pattern(gm, lambda x: x.transpose(1, 2), lambda x: x.transpose(2, 1), [cube]).count > 0


REFUSED = [
    (gated, lambda x, y: x * y, "the pattern returns 2 values, and the replacement 1"),
    (gated, lambda x, y: (x.t(), x * y), "raised"),
    (gated, lambda x, y: (x.double(), x * y), r"would give float64\[2, 16, 192\]"),
    (gated, lambda x: (x, x), "the pattern takes 2 inputs, and the replacement 1"),
    (lambda x, y: x.t(), lambda x, y: x, "does not use its input y"),
    (left_alone, left_alone, "the pattern computes nothing"),
    (lambda x: x.t(), lambda x: x + 1, r"would give .* with strides"),
    (lambda x: x @ torch.ones(4, 4), left_alone, "the graph has no aten.ones|makes a tensor of its own"),
]


def test_a_refusal_changes_nothing(joints):
    gm = aot.clone(joints["captured"])
    before = [n.format_node() for n in gm.graph.nodes]
    for pattern, replacement, why in REFUSED:
        try:
            why_not = replace_pattern(gm, pattern, replacement).near_miss
        except WorkbenchError as error:
            why_not = str(error)
        assert re.search(why, why_not), why_not
        assert before == [n.format_node() for n in gm.graph.nodes], why


def test_bitwise_on_real_values_and_every_verdict():
    authored = author(small({}, layers=1), World("gloo", 1, 0, torch.device("cpu")))
    joint = capture(authored)

    def gradients(passes):
        fork = joint.fork()
        records = run_joint(fork, passes)
        assert {verdict.outcome for record in records for verdict in record.verdicts} <= {Outcome.PASS}
        authored.module.zero_grad()
        loss = compile_step(partition(fork))(*authored.example_batch())
        loss.backward()
        return [loss, *(p.grad for p in authored.module.parameters())]

    for before, pattern, replacement in (
            ([], turned_twice, left_alone), (["inductor_decomposition"], gated, gated_the_other_way)):
        with user_pass("own", replacing(pattern, replacement)):
            assert all(map(torch.equal, gradients(before), gradients([*before, "own"]))), pattern


def replacing(pattern, replacement):
    def own(gm):
        assert replace_pattern(gm, pattern, replacement)
        return gm

    return own
