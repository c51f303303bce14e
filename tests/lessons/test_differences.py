"""Two captures of one step, aligned: what is told of real ones, and of planted differences."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from blocks import Summed
from on_ranks import calls, insert
from torch import nn

from workbench import author_module, capture, fake_world
from workbench.graph.read.nodes import is_backward, module_path, output_values
from workbench.recipe.recipe import recipe_names
from workbench.torch_api import aot
from workbench.torch_api.ops import op_name
from workbench_lessons.l17_two_captures.differences import compare_operators

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def both():
    layers = OrderedDict(up=nn.Linear(8, 16, bias=False), norm=nn.RMSNorm(16), down=nn.Linear(16, 8, bias=False))
    with fake_world(2) as world:
        mesh = world.mesh_of({"dp_shard": 2})
        authored = author_module(Summed(layers), world, mesh, batch=lambda: (torch.empty(4, 8),))
        yield tuple(capture(authored, by=by).graph for by in ("joint", "traced"))


def told(both, fault):
    """Differences, but for what the captures differ in without a fault."""
    joint, traced = both
    usual = {str(d) for d in compare_operators(joint, traced)[1]}
    changed = aot.clone(traced)
    for node in changed.graph.nodes:
        if "custom" in node.meta:
            node.meta["custom"] = dict(node.meta["custom"])
    fault(changed)
    return [d for d in compare_operators(joint, changed)[1] if str(d) not in usual]


def test_both_captures_have_the_same_collectives_and_operators(both):
    aligned, differences = compare_operators(*both)
    assert aligned == sum(n.op == "call_function" for n in both[0].graph.nodes)
    kinds = {d.kind for d in differences}
    assert "metadata" in kinds and not kinds & {"collectives", "operators", "gradients"}
    inputs = {d.what for d in differences if d.kind == "inputs"}
    assert inputs <= {"meshes and sizes of DTensors"}  # torch 2.11 has none


def backward_mm(graph):
    return next(n for n in graph.graph.nodes if op_name(n.target) == "aten.mm" and is_backward(n) and module_path(n))


def loses_a_module(graph):
    meta = backward_mm(graph).meta
    for name in ("nn_module_stack", "fwd_nn_module_stack"):
        meta.pop(name, None)


def loses_a_direction(graph):
    backward_mm(graph).meta["partitioner_tag"] = "is_forward"


def gains_a_view_and_an_operator(graph):
    node = backward_mm(graph)
    insert(graph, node, torch.ops.aten.view.default, node, [-1])
    insert(graph, node, torch.ops.aten.cos.default, node)


def loses_a_gradient(graph):
    output = graph.graph.output_node()
    place = next(i for i, desc in enumerate(output.meta["desc"]) if aot.gradient_of(desc) == "norm.weight")
    values, descs = list(output_values(graph)), list(output.meta["desc"])
    del values[place], descs[place]
    output.args, output.meta = (values,), {**output.meta, "desc": descs}


@pytest.mark.parametrize(("fault", "rows"), [
    (loses_a_module, {("metadata", "module present", 1, 0)}),
    (loses_a_direction, {("metadata", "direction differs", "backward", "forward")}),
    (gains_a_view_and_an_operator, {("views", "aten.view", 0, 1), ("operators", "aten.cos", 0, 1)}),
    (loses_a_gradient, {("gradients", "norm.weight", 1, 0)})])
def test_a_fault_is_told_by_its_kind(both, fault, rows):
    assert {(d.kind, d.what, d.joint, d.traced) for d in told(both, fault)} == rows


def test_a_collective_that_is_missing_is_told_with_its_bytes(both):
    def fault(graph):
        wait = next(n for n in graph.graph.nodes if op_name(n.target) == "_c10d_functional.wait_tensor"
                    and "reduce_scatter" in str(n.args[0].target))
        start, source = wait.args[0], wait.args[0].args[0]
        wait.replace_all_uses_with(source)
        graph.graph.erase_node(wait)
        graph.graph.erase_node(start)

    found = {d.what for d in told(both, fault) if d.kind == "collectives"}
    assert {"_c10d_functional.reduce_scatter_tensor", "_c10d_functional.wait_tensor"} <= found
    assert any(what.startswith("bytes of reduce_scatter over ") for what in found)


def test_another_order_of_collectives_is_told(both):
    def fault(graph):
        first, second, *_ = calls(graph, "_c10d_functional.all_gather_into_tensor")
        second.append(first) if not any(u < second for u in first.users) else graph.graph.output_node().prepend(second)

    found = told(both, fault)
    assert [d.what for d in found if d.kind == "order"][:1] == ["collectives"]


def test_the_committed_table_has_every_recipe_with_its_values_or_a_reason():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "captures.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["recipes"]
    assert [row["recipe"] for row in rows] == recipe_names()
    for row in rows:
        if row["refused"]:
            assert all(row["refused"].values())
        else:
            assert set(row["verdicts"].values()) == {"PASS"}, row["recipe"]
            assert row["values"][0] == ("UNKNOWN" if row["world"] == "fake" else "PASS"), row["recipe"]
