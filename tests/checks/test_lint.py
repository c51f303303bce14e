from random import Random

import pytest
import torch
from graphs_by_hand import C10D, group_name, named, shards, trace, two_layer_graph
from mutants.operators import OPERATORS

from workbench import Outcome, facts_of
from workbench.checks.lint import lint, unwaited
from workbench.torch_api.aot import clone


def other_output(gm):
    output = gm.graph.output_node()
    value = output.args[0][1]
    with gm.graph.inserting_before(output):
        cast = gm.graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": torch.bfloat16})
    cast.meta["val"] = value.meta["val"].to(torch.bfloat16)
    output.args = ([output.args[0][0], cast],)


def call_module(gm):
    gm.add_module("inner", torch.nn.Identity())
    relu = named(gm, "aten.relu")[0]
    with gm.graph.inserting_after(relu):
        node = gm.graph.call_module("inner", (relu,))
    relu.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)


def print_a_value(gm):
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(print, (named(gm, "aten.relu")[0],))


def says_another_device(gm):
    mm = named(gm, "aten.mm")[0]
    mm.meta["val"] = mm.meta["val"].to("meta")


BY_HAND = [
    (says_another_device, "float32[3, 8] on meta, and aten.mm gives float32[3, 8] on cpu: set its meta['val']"),
    (other_output, "output 1 (_to_copy_default) was float32[3, 8] on cpu and is bfloat16"),
    (call_module, "is a call_module"),
    (print_a_value, "the effect 'call of print' was added (new print"),
]
MUTANTS = {
    "lose_wait": "without a wait",
    "meta_shape": "its result is float32[8, 3] on cpu, and aten.mm gives float32[3, 8]",
    "swap_arguments": "node mm: aten.mm cannot take",
    "drop_output": "2 outputs before, 1 after (lost relu): return as many",
    "input_meta": "placeholder shard_a_1 was float32[2, 8] on cpu and is bfloat16[2, 8]",
    "drop_input": "placeholders changed (lost shard_a_1)",
    "swap_inputs": "placeholders changed: they are in another order",
    "move_before_input": "malformed",
    "wait_for_nothing": "1 unread wait more than before (new wait_tensor_default)",
    "write_input": "the effect 'write to shard_a_1' was added (new mul__tensor)",
    "draw_uselessly": "1 draw of random numbers more than before (new rand_like_default)",
}
"""Of tests/mutants."""


def planted(name):
    return lambda gm: OPERATORS[name].edit(gm, Random(0))


@pytest.mark.parametrize(("fault", "message"), [
    *BY_HAND, *((planted(name), message) for name, message in MUTANTS.items())])
def test_each_fault_is_caught_and_named(fake4, fault, message):
    gm = two_layer_graph()
    before = clone(gm)
    fault(gm)
    found = lint((before,), (gm,))
    assert found.outcome is Outcome.FAIL and message in found.message


@pytest.mark.parametrize(("key", "message"), [
    ("partitioner_tag", "nodes lost their metadata"), ("stack_trace", "3 of 20 nodes lost their metadata")])
def test_a_joint_pass_that_loses_tags_or_stack_traces_is_caught(fake4, key, message):
    def chain(x):
        for _ in range(20):
            x = x.sin()
        return x

    gm = trace(chain, torch.ones(4), graph="joint")
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    for node in nodes:
        node.meta |= {"partitioner_tag": "is_forward", "stack_trace": "File m.py, line 1"}
    before = clone(gm)
    for node in nodes[:2]:  # a tenth may be lost: a pass adds nodes of its own
        del node.meta[key]
    assert lint((before,), (gm,)).outcome is Outcome.PASS
    del nodes[2].meta[key]
    found = lint((before,), (gm,))
    assert found.outcome is Outcome.FAIL and message in found.message


def test_two_graphs_are_checked_and_the_wrong_one_is_named(fake4):
    good, bad = two_layer_graph(), two_layer_graph()
    facts_of(bad).part = "backward"
    before = clone(good), clone(bad)
    planted("lose_wait")(bad)
    found = lint(before, (good, bad))
    assert found.outcome is Outcome.FAIL and found.message.startswith("backward: ")


def two_buckets(shard):
    """One buffer, and a gather into each half of it, the second one in place."""
    rows = 4 * shard.shape[0]
    whole = shard.new_empty(2 * rows, shard.shape[1])
    mine = whole.narrow(0, rows, shard.shape[0]).copy_(shard)
    first = C10D.all_gather_into_tensor_out(shard, 4, group_name(), out=whole.narrow(0, 0, rows))
    second = C10D.all_gather_into_tensor_out(mine, 4, group_name(), out=whole.narrow(0, rows, rows))
    return C10D.wait_tensor(first).exp(), C10D.wait_tensor(second).exp()


@pytest.mark.parametrize(("touch", "of", "said"), [
    ("read", "out", "the output of collective all_gather_into_tensor_out is read by early without a wait"),
    ("write", "base", "the output of collective all_gather_into_tensor_out is written by early without a wait"),
    ("write", "shard", "the input of collective all_gather_into_tensor_out is written by early without a wait"),
    ("read", "shard", ""),
    ("read", "other half", ""),
])
def test_memory_that_a_collective_uses_is_not_touched_before_its_wait(fake4, touch, of, said):
    gm = trace(two_buckets, shards(4)[0])
    assert lint((gm,), (clone(gm),)).outcome is Outcome.PASS
    first, second = named(gm, "all_gather")
    memory = {"out": first.kwargs["out"], "base": named(gm, "new_empty")[0], "shard": first.args[0],
              "other half": second.kwargs["out"]}[of]
    target = torch.ops.aten.sigmoid.default if touch == "read" else torch.ops.aten.zero_.default
    second.kwargs["out"].append(first)
    with gm.graph.inserting_after(first):
        node = gm.graph.create_node("call_function", target, (memory,), name="early")
    node.meta["val"] = memory.meta["val"]
    assert unwaited(gm) == ([said] if said else [])


@pytest.mark.parametrize(("written", "problems"), [(1, 0), (0, 1)])
def test_items_that_one_operator_made_lie_apart(fake4, written, problems):
    """One item is reduced, and it or the other is written meanwhile."""
    def normed(x):
        return torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)[:2]

    gm = trace(normed, shards(4)[2])
    items = [n for n in gm.graph.nodes if "getitem" in n.name]
    with gm.graph.inserting_before(gm.graph.output_node()):
        start = gm.graph.call_function(C10D.all_reduce.default, (items[0], "sum", group_name()))
        gm.graph.call_function(torch.ops.aten.zero_.default, (items[written],))
        gm.graph.call_function(C10D.wait_tensor.default, (start,))
    assert len(unwaited(gm)) == problems


@pytest.mark.parametrize(("items", "said"), [(1, "gives float32[3, 8] on cpu, float32[3, 1] on cpu"),
                                             (None, "operator.getitem cannot take native_layer_norm")])
def test_what_an_operator_of_several_results_gives(fake4, capfd, items, said):
    gm = trace(lambda x: torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)[:1], shards(4)[2])
    before, (norm,) = clone(gm), named(gm, "native_layer_norm")
    if items:
        norm.meta["val"] = norm.meta["val"][:items]
    else:
        item = next(n for n in gm.graph.nodes if "getitem" in n.name)
        item.args = (norm, 99)
    assert said in lint((before,), (gm,)).message and "Traceback" not in capfd.readouterr().err


def test_a_wait_behind_a_view_counts_and_a_collective_that_blocks_needs_none(fake4):
    def viewed(shard, x):
        resharded = torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group_name()).exp()
        return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, 4, group_name()).view(-1)), resharded

    gm = trace(viewed, *shards(4)[1:])
    assert lint((gm,), (clone(gm),)).outcome is Outcome.PASS


def test_a_dropped_write_to_an_input_is_caught(fake4):
    gm = trace(lambda x: [x.add_(1), x * 2], torch.ones(4))
    before = clone(gm)
    planted("drop_write")(gm)
    assert "the effect 'write to x_1' was dropped" in lint((before,), (gm,)).message
