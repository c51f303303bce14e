"""Passes of another list under our verdicts, on graphs of our own and without torchtitan."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.distributed as dist
from graphs_by_hand import gather, two_layer_graph
from on_ranks import calls, insert, small, user_pass
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import CodeGen

from workbench import Outcome, WorkbenchError, fake_world, judge_graph_passes, judged
from workbench.errors import UnusableGraph
from workbench.graph.read.nodes import is_backward, module_path
from workbench.lab.graph_passes import bridge
from workbench.world.mesh import current_world

ATEN = torch.ops.aten
RECIPE = small({"dp_shard": 2})


def step(weight, bias, x):
    loss = (torch.relu(x @ weight) + bias).square().mean()
    return [loss, *torch.autograd.grad(loss, [weight, bias])]


@pytest.fixture
def traced():
    """(graph of a step, its fake inputs, real ones); a bias of zeros, as at a start."""
    torch.manual_seed(0)
    values = [torch.randn(8, 8, requires_grad=True), torch.zeros(8, requires_grad=True), torch.randn(4, 8)]
    with torch.fx.traceback.preserve_node_meta():
        gm = make_fx(step, tracing_mode="fake")(*values)
    values = [value.detach() for value in values]
    return gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")], values


def idle(gm, example_inputs):
    return gm


def clamp_for_relu(gm, example_inputs=None):
    for node in calls(gm, "aten.relu"):
        node.target, node.args = ATEN.clamp_min.default, (node.args[0], 0)
    return gm


def tags(gm, example_inputs):
    for node in calls(gm, "aten.mm"):
        node.meta["recompute"] = "always"
    return gm


def drop_bias(gm, example_inputs):
    """Right while the bias is zero."""
    add = calls(gm, "aten.add")[0]
    add.replace_all_uses_with(add.args[0])
    gm.graph.erase_node(add)
    return gm


def other_order(gm, example_inputs, times=1.0):
    """A product adds the same terms in the reverse order."""
    mm = calls(gm, "aten.mm")[0]
    left, right = mm.args
    with gm.graph.inserting_before(mm):
        rows = gm.graph.call_function(ATEN.flip.default, (left, [1]))
        columns = gm.graph.call_function(ATEN.flip.default, (right, [0]))
        product = gm.graph.call_function(ATEN.mm.default, (rows, columns))
        total = gm.graph.call_function(ATEN.mul.Tensor, (product, times))
    mm.replace_all_uses_with(total)
    gm.graph.erase_node(mm)
    return gm


def told(record, check):
    verdict = record.verdict(check)
    return None if verdict is None else str(verdict.outcome)


def test_each_pass_of_a_list_is_judged_inside_anybodys_trainer(traced):
    gm, inputs, values = traced
    text = gm.code
    after, records = judged(gm, inputs, [idle, clamp_for_relu, tags, clamp_for_relu], values)
    assert [record.name for record in records] == ["idle", "clamp_for_relu", "tags", "clamp_for_relu#2"]
    assert [told(record, "effect") for record in records] == ["NO_EFFECT", "PASS", "UNKNOWN", "NO_EFFECT"]
    tagged = records[2].verdict("effect").message
    assert tagged.startswith("no node is another, and the metadata recompute of 2 nodes is")
    assert {told(record, "numerics") for record in records} == {"PASS"} and gm.code == text
    assert all(torch.equal(a, b) for a, b in zip(after(*values), gm(*values), strict=True))
    assert not values[1].any()  # varied for the comparison, and as they were


def test_a_graph_that_was_traced_on_real_tensors_is_judged_too(traced):
    """make_fx gives each of its values a fake mode of its own."""
    weight, bias, x = traced[2]
    gm = make_fx(step)(weight.requires_grad_(), bias.requires_grad_(), x)
    values = [value.detach() for value in (weight, bias, x)]
    _, records = judged(gm, values, [clamp_for_relu, other_order, drop_bias], values)
    assert [told(record, "lint") for record in records] == ["PASS"] * 3
    assert [told(record, "numerics") for record in records] == ["PASS", "PASS", "FAIL"]


def test_a_sum_in_another_order_gets_a_contract_that_says_so_and_does_not_cover_a_wrong_one(traced):
    gm, inputs, values = traced
    _, records = judged(gm, inputs, [functools.partial(other_order, times=1.001)], values)
    assert told(records[0], "numerics") == "FAIL"
    _, (record,) = judged(gm, inputs, [other_order], values)
    contract = record.item.contract
    assert record.outcome is Outcome.PASS and contract.numerics == "reduction_order" and contract.source == "proposed"
    assert contract.changes.startswith("proposed from what it did, reduction_order: nodes ")
    assert "of 4 new nodes, 4 came without a value, 4 came without a direction" in contract.changes


def test_a_registered_contract_is_the_one_that_a_pass_of_its_name_is_held_to(traced):
    gm, inputs, values = traced
    with user_pass("other_order", other_order, stage="joint", numerics="exact"):
        _, (record,) = judged(gm, inputs, [other_order], values)
    assert told(record, "numerics") == "FAIL" and record.item.contract.numerics == "exact"


def test_a_graph_called_with_lists_is_compared_too_and_a_lost_convention_is_told(traced):
    _, _, (weight, bias, x) = traced
    weight.requires_grad_(), bias.requires_grad_()
    gm = make_fx(lambda state, batch: step(*state, *batch), tracing_mode="fake")([weight, bias], [x])
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    values = [value.detach() for value in (weight, bias, x)]
    assert told(judged(gm, inputs, [drop_bias], values)[1][0], "numerics") == "FAIL"

    def flattens(gm, example_inputs):
        gm.graph.set_codegen(CodeGen())
        gm.recompile()
        return gm

    _, (record,) = judged(gm, inputs, [flattens], values)
    assert told(record, "numerics") is None and record.verdict("lint").outcome is Outcome.FAIL
    assert record.verdict("lint").message == ("it is called with an argument for each input, and was with a tree of 2 "
                                              "inputs: put gm.graph._codegen back, and recompile")
    with pytest.raises(UnusableGraph, match="'flattens' left .* called with an argument for each input, and was with"):
        judged(gm, inputs, [flattens, idle], values)


def wants(gm, example_inputs, what):
    if isinstance(what, Exception):
        raise what
    what(gm)


ANOTHER_TORCH = f"wants another torch than {torch.__version__}: "
REASONS = [
    (AssertionError("Torch not compiled with CUDA enabled"),
     "wants CUDA, which this machine does not have: Torch not compiled"),
    (ImportError("cannot import name 'NoSuchName' from 'torch.distributed.fsdp'"),
     ANOTHER_TORCH + "cannot import name 'NoSuchName'"),
    (lambda gm: torch.ops.no_such_library.offload, ANOTHER_TORCH + "'_OpNamespace' 'no_such_library' object"),
    (lambda gm: CodeGen(no_such_keyword=gm), ANOTHER_TORCH + "CodeGen.__init__() got an unexpected keyword"),
    (lambda gm: idle(gm, no_such_keyword=gm),
     "raised TypeError: idle() got an unexpected keyword argument 'no_such_keyword'"),
    (ModuleNotFoundError("No module named 'no_such_module'"),
     "wants a module that is not installed: No module named 'no_such_module'"),
    (lambda gm: bool(ShapeEnv().create_unbacked_symint() == 3), "wants sizes that are known before the step: "),
    (ValueError("expected a dynamic dimension of an input"),
     "wants inputs of symbolic sizes, and this graph's are numbers: expected a dynamic dimension"),
    (lambda gm: calls(gm, "aten.mm")[0].nothing_of_this_name,
     "raised AttributeError: 'Node' object has no attribute 'nothing_of_this_name'"),
]


def test_a_pass_that_raises_is_named_with_its_reason_and_line(traced, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gm, inputs, values = traced
    for what, reason in REASONS:
        with pytest.raises(WorkbenchError) as caught:
            judged(gm, inputs, [idle, functools.partial(wants, what=what)], values)
        text = str(caught.value)
        assert text.startswith(f"pass 'wants' {reason}")
        where = "wants" if isinstance(what, Exception) else "<lambda>"
        assert re.search(rf" \({re.escape(__file__)}, line \d+, in {where}: .+\)$", text), text


def wants_a_plan(gm, example_inputs=None, *, module_bucket_plans, order):
    return gm


def never(gm, example_inputs):
    pytest.fail("it was called")


def test_what_is_no_list_of_such_passes_is_refused_before_one_runs(traced):
    gm, inputs, values = traced
    functions = r"takes a list of passes, each a function of \(gm, example_inputs\), and got "
    for passes, said in (
        ([], functions + r"\[\]"),
        ("idle", functions + "'idle'"),
        ([never, "idle"], functions + r"\[<function never at \w+>, 'idle'\]"),
        ([never, wants_a_plan], "'wants_a_plan' takes gm, example_inputs, module_bucket_plans, order, and not gm, "
                                "example_inputs alone: missing .* 'module_bucket_plans'; functools.partial binds"),
    ):
        with pytest.raises(WorkbenchError, match=said):
            judged(gm, inputs, passes)
    weight, bias, x = values
    for wrong, said in (
        ([weight, bias], "the graph has 3 inputs, and values has 2"),
        ([weight, bias, x[:3]], r"x_1 is float32 \[4, 8\], and in values float32 \[3, 8\]"),
        ([weight, 0.0, x], r"bias_1 is float32 \[8\], and in values float"),
    ):
        with pytest.raises(WorkbenchError, match=f"^judged: {said}$"):
            judged(gm, inputs, [never], wrong)
    with pytest.raises(WorkbenchError, match="and in inputs float32"):
        judged(gm, inputs[::-1], [never], values)
    with fake_world(2) as world, pytest.raises(WorkbenchError, match="judge_graph_passes takes a list of passes"):
        judge_graph_passes((), RECIPE, world)


def sees_modules(gm, example_inputs):
    """What graph_trainer's passes read is there, with the name that they have for it."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert {bool(node.meta.get("autograd_backward")) for node in nodes} == {True, False}
    assert all(is_backward(node) is bool(node.meta.get("autograd_backward")) for node in nodes)
    paths = {node.meta["custom"].get("module_fqn") for node in nodes if "custom" in node.meta}
    assert {"lm_head", "layers.0.attention.wq"} <= paths and "output" not in paths
    assert "autograd_backward" not in gm.graph.output_node().meta
    return gm


def regather(gm, example_inputs):
    """Gather the weights that the backward reads once more, as recomputation does, in nodes without metadata."""
    for node in [n for n in gm.graph.nodes if not n.meta.get("autograd_backward")]:
        late = [user for user in node.users if user.meta.get("autograd_backward")]
        chain = [node]
        while late and len(chain[-1].all_input_nodes) == 1 and "all_gather" not in str(chain[-1].target):
            chain += chain[-1].all_input_nodes
        if not late or "all_gather" not in str(chain[-1].target):
            continue
        value = chain[-1].args[0]
        with gm.graph.inserting_before(late[0]):
            for first in reversed(chain):
                value = gm.graph.call_function(first.target, (value, *first.args[1:]))
        for user in late:
            user.replace_input_with(node, value)
    gm.recompile()
    return gm


def test_on_our_capture_their_metadata_is_there_and_what_new_nodes_lack_is_filled_in():
    with fake_world(2) as world:
        records, built = judge_graph_passes([sees_modules, regather], RECIPE, world, "light",
                                            renames={"output": "lm_head"})
    seen, again = records
    assert told(seen, "effect") == "NO_EFFECT" and told(again, "lint") == "PASS"
    assert again.item.contract.repeats and told(again, "collectives") == "PASS"
    changes = again.item.contract.changes
    assert re.search(r"launches \d+ to \d+; \d+ of them sent again; of \d+ new nodes, \d+ came without", changes)
    known = {node.name for node in again.before[0].graph.nodes}
    new = [node for node in again.after[0].graph.nodes if node.name not in known]
    assert new and all("val" in node.meta and is_backward(node) for node in new)
    assert all(map(module_path, new))
    gathers = [node for node in new if "all_gather" in str(node.target)]
    assert gathers and len(calls(built.pair.backward, "_c10d_functional.all_gather_into_tensor")) == len(gathers)


def gelu_for_silu(gm, example_inputs):
    calls(gm, "aten.silu")[0].target = ATEN.gelu.default
    return gm


def on_a_rank():
    records, _ = judge_graph_passes([regather, other_order, gelu_for_silu], RECIPE, current_world())
    assert [told(record, "numerics") for record in records] == ["PASS", "PASS", "FAIL"]
    assert [record.item.contract.numerics for record in records[:2]] == ["exact", "reduction_order"]


@pytest.mark.ranks
def test_values_are_compared_on_ranks_and_rounding_loosens_a_proposed_contract(pool2):
    pool2.run(on_a_rank)


def summed_over(name, passes):
    """The records of the passes on a step that sums its gradient over a group."""
    c10d = torch.ops._c10d_functional

    def summed(weight, x):
        loss = (x @ weight).relu().sum()
        return [loss, c10d.wait_tensor(c10d.all_reduce(torch.autograd.grad(loss, [weight])[0], "sum", name))]

    values = [torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)]
    gm = make_fx(summed, tracing_mode="fake")(*values)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return judged(gm, inputs, passes, [value.detach() for value in values])[1]


def largest_on_one_rank(gm, example_inputs):
    """Rank 1 takes the largest where rank 0 adds: it would run, and compute something else."""
    (start,) = calls(gm, "_c10d_functional.all_reduce")
    start.args = (start.args[0], "max" if dist.get_rank() else "sum", start.args[2])
    return gm


def in_groups():
    """A sum over a group of this rank alone, whose name differs between the ranks; and over all, with a fault."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    (record,) = summed_over(groups[dist.get_rank()].group_name, [clamp_for_relu])
    assert record.outcome is Outcome.PASS
    with pytest.raises(UnusableGraph, match="'largest_on_one_rank' .* rank 1 would run _c10d_functional.all_reduce "
                                            r"float32\[4, 4\] max"):
        summed_over(dist.group.WORLD.group_name, [clamp_for_relu, largest_on_one_rank])


@pytest.mark.ranks
def test_groups_of_other_names_are_the_same_launches_and_other_launches_are_refused_before_they_run(pool2):
    pool2.run(in_groups)


def gathered_twice(shard, x):
    first, second = gather(shard), gather(shard)
    return [(torch.relu(x @ first) @ second).sum()]


def first_gather_for_all(gm, example_inputs):
    first, *others = calls(gm, "_c10d_functional.wait_tensor")
    for wait in others:
        wait.replace_all_uses_with(first)
        (start,) = wait.all_input_nodes
        gm.graph.erase_node(wait)
        gm.graph.erase_node(start)
    return gm


def gathers_doubled(gm, example_inputs):
    """The second product reads a gather of twice the shard."""
    wait, mm = calls(gm, "_c10d_functional.wait_tensor")[1], calls(gm, "aten.mm")[1]
    (start,) = wait.all_input_nodes
    doubled = insert(gm, wait, ATEN.mul.Tensor, start.args[0], 2.0)
    again = insert(gm, doubled, start.target, doubled, *start.args[1:])
    mm.replace_input_with(wait, insert(gm, again, wait.target, again))
    return gm


def test_what_is_not_sent_again_gets_a_contract_that_says_so_and_another_value_sent_or_left_out_fails(fake4):
    gm = make_fx(gathered_twice, tracing_mode="fake")(torch.ones(2, 8), torch.ones(4, 8))
    (record,) = judged(gm, [torch.ones(2, 8), torch.ones(4, 8)], [first_gather_for_all])[1]
    contract = record.item.contract
    assert contract.fewer_bytes and not contract.repeats and told(record, "collectives") == "PASS"
    assert "; launches 2 to 1; 1 not sent again" in contract.changes
    gm = two_layer_graph()
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    for wrong in (first_gather_for_all, gathers_doubled):
        (record,) = judged(gm, inputs, [wrong])[1]
        contract = record.item.contract
        assert not contract.fewer_bytes and not contract.repeats and told(record, "collectives") == "FAIL"
        assert "sent again" not in contract.changes


def test_without_values_numerics_is_unknown(traced):
    gm, inputs, _ = traced
    _, (record,) = judged(gm, inputs, [clamp_for_relu])
    assert str(record.verdict("numerics")) == "numerics: UNKNOWN (no values were given: pass those of a step)"


def test_a_new_node_has_the_direction_of_its_inputs_and_the_module_of_its_readers():
    """x and y are forward, and g is backward. both and again follow their inputs, which have `layers.0` in common; only
    g's side reads early, and only wq late. What `told` gives cannot be told without running it.
    """
    graph = torch.fx.Graph()
    x, y, g = (graph.placeholder(name) for name in "xyg")
    early = graph.call_function(ATEN.neg.default, (x,))
    earlier = graph.call_function(ATEN.neg.default, (early,))
    old = graph.call_function(ATEN.mul.Tensor, (g, earlier))
    both = graph.call_function(ATEN.mul.Tensor, (y, old))
    again = graph.call_function(ATEN.neg.default, (both,))
    free = graph.call_function(ATEN.neg.default, (x,))
    opaque = graph.call_function(told, (free, "numerics"))
    graph.output([again, old, opaque])
    for node in (x, y, g, old):
        node.meta["val"] = torch.ones(2)
    y.meta["custom"] = {"module_fqn": "layers.0.wk"}
    old.meta |= {"autograd_backward": True, "partitioner_tag": "is_backward", "custom": {"module_fqn": "layers.0.wq"}}
    filled = bridge.fill_in(torch.fx.GraphModule({}, graph), {"x", "y", "g", old.name})
    assert str(filled) == ("of 6 new nodes, 6 came without a value, 6 came without a direction, 6 came without a "
                           "module, filled in here but for the value of told")
    new = (early, earlier, both, again, free)
    assert list(map(is_backward, new)) == [True] * 4 + [False]
    assert list(map(module_path, new)) == ["layers.0.wq"] * 2 + ["layers.0"] * 2 + [""]
    assert [node.meta.get("custom") for node in (early, free)] == [{"module_fqn": "layers.0.wq"}, None]
