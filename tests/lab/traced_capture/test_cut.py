"""Recomputation placed in a traced graph: what it saves, and the faults that its check must find."""

from __future__ import annotations

import pytest
import torch
from on_ranks import small

from workbench import WorkbenchError, author_module, capture, partition
from workbench.authoring.author import author
from workbench.graph.read.nodes import is_backward, output_values
from workbench.graph.read.peak import estimated_bytes
from workbench.lab.traced_capture import checks
from workbench.lab.traced_capture.cut import AGAIN, cut
from workbench.pipeline.run_passes import run_joint
from workbench.recipe.sections import PassSpec
from workbench.torch_api import aot
from workbench.torch_api.ops import op_name

pytestmark = pytest.mark.integration
AC = PassSpec(name="activation_checkpointing", options={"policy": "full"})


@pytest.fixture(scope="module")
def traced(fake4):
    """The traced capture of two layers on four FSDP ranks; fork it."""
    return capture(author(small({"dp_shard": 4}, layers=2), fake4), by="traced")


def after(traced, *passes):
    joint = traced.fork()
    run_joint(joint, list(passes))
    return joint


def repeats(pair):
    return [n for n in pair.backward.graph.nodes if AGAIN in n.meta]


def test_without_tags_nothing_is_repeated_and_full_checkpointing_saves_memory(traced):
    plain, less = cut(after(traced)), cut(after(traced, AC))
    assert not repeats(plain) and len(repeats(less)) > 100
    was, now = estimated_bytes(*plain.graphs), estimated_bytes(*less.graphs)
    assert now["saved"] < was["saved"] / 3 and now["peak_forward"] < was["peak_forward"]
    assert max(now["peak_forward"], now["peak_backward"]) < max(was["peak_forward"], was["peak_backward"])


def test_resharding_gathers_again_in_the_backward_and_saves_no_gathered_weight(traced):
    joint = after(traced, "reshard_after_forward")
    pair = cut(joint)
    gathers = [n for n in repeats(pair) if "all_gather" in str(n.target)]
    tagged = [n for n in joint.graph.graph.nodes if "all_gather" in str(n.target) and not is_backward(n)]
    assert 0 < len(gathers) <= len(tagged)
    assert checks.of_pair(joint.graph, pair.backward).outcome == "PASS"


def test_a_repeat_stands_in_front_of_its_first_reader_and_has_the_name_of_what_it_repeats(traced):
    pair = cut(after(traced, AC))
    forward = {n.name for n in pair.forward.graph.nodes}
    order = {n: i for i, n in enumerate(pair.backward.graph.nodes)}
    assert {n.name for n in repeats(pair)} & forward
    own = [n for n in pair.backward.graph.nodes if n.op == "call_function" and AGAIN not in n.meta]
    first = min(order[n] for n in repeats(pair))
    assert first > order[own[0]]  # the loss's backward comes before the last layer is computed again


def reads_another_value(kept, pair):
    node = next(n for n in repeats(pair) if op_name(n.target) == "aten.mm")
    other = next(n for n in pair.backward.graph.nodes if n is not node.args[0] and n.op == "call_function"
                 and n < node and isinstance(n.meta.get("val"), torch.Tensor))
    node.replace_input_with(node.args[0], other)


def was_overwritten(kept, pair):
    node = next(n for n in repeats(pair) if n.all_input_nodes and n.all_input_nodes[0].op == "placeholder"
                and aot.parameter_of(n.all_input_nodes[0]) is None)
    read = next(n for n in kept.graph.nodes if n.name == node.meta[AGAIN]).all_input_nodes[0]
    end = next(n for n in kept.graph.nodes if is_backward(n) and n.op == "call_function")
    with kept.graph.inserting_before(end):
        written = kept.graph.call_function(torch.ops.aten.mul_.Scalar, (read, 2))
    written.meta = {"val": read.meta["val"], "partitioner_tag": "is_forward"}


def misses_a_gradient(kept, pair):
    output = pair.backward.graph.output_node()
    values, descs = output_values(pair.backward), output.meta["desc"]
    output.args, output.meta["desc"] = (tuple(values[1:]),), descs[1:]


@pytest.mark.parametrize(("fault", "said"), [
    (reads_another_value, "is repeated as aten.mm"), (was_overwritten, "has overwritten"),
    (misses_a_gradient, "the backward returns no gradient of 'tok_embeddings.weight'")])
def test_a_fault_of_the_repeats_is_found(traced, fault, said):
    joint = after(traced, AC)
    kept = joint.graph
    pair = cut(joint)
    fault(kept, pair)
    found = checks.of_pair(kept, pair.backward)
    assert found.outcome == "FAIL" and said in found.message


def test_a_tag_that_is_not_placed_is_found(traced):
    joint = after(traced, AC)
    kept = aot.clone(joint.graph)
    for node in joint.graph.graph.nodes:
        if op_name(node.target) == "aten.mm":
            node.meta.pop("recompute", None)  # saved in its place
    found = checks.of_pair(kept, cut(joint).backward)
    assert found.outcome == "FAIL" and "and the backward gets it from the forward" in found.message


def test_each_capture_has_its_own_cut(traced, fake4):
    assert partition(traced.fork()).by_part.keys() == {"forward", "backward"}
    joint = capture(author(small({"dp_shard": 4}), fake4))
    with pytest.raises(WorkbenchError, match="has a partitioner: call partition\\(joint\\)"):
        cut(joint)


class Keeps(torch.nn.Module):
    """A layer, and what `act` does beside it."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act = torch.nn.Linear(4, 4), act
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        return self.act(self, self.layer(x)).square().mean()


def keeps(act, world):
    return author_module(Keeps(act), world, None, batch=lambda: (torch.ones(2, 4),))


def clamps(m, x):
    with torch.no_grad():
        m.layer.weight.clamp_(-0.1, 0.1)
    return x @ m.layer.weight


def decays(m, x):
    m.layer.weight.data.mul_(0.9)
    return x @ m.layer.weight


@pytest.mark.parametrize(("act", "told"), [
    (lambda m, x: x if x.sum() > 0 else -x, "cannot be captured: GuardOnDataDependentSymNode: .*: change that line"),
    (lambda m, x: x.detach(), "its forward returns no scalar tensor that depends on a parameter"),
    (clamps, "parameter.*: write between the steps"), (decays, "parameter.*: write between the steps"),
], ids=["branch", "no gradient", "writes a weight", "writes a weight's data"])
def test_a_model_that_cannot_be_traced_is_refused_in_a_sentence(fake4, act, told):
    authored = keeps(act, fake4)
    with pytest.raises(WorkbenchError, match=f"model Keeps: .*{told}.*joint"):
        capture(authored, by="traced")
    assert isinstance(authored.module.layer.weight, torch.nn.Parameter) and authored.module.training


@pytest.mark.parametrize(("name", "tag"), [
    ("aten.sigmoid_backward", "is_forward"), ("aten.sigmoid", "is_backward")])
def test_a_direction_that_is_wrong_is_named(fake4, name, tag):
    joint = capture(keeps(lambda m, x: x.sigmoid(), fake4), by="traced")
    next(n for n in joint.graph.graph.nodes if op_name(n.target) == name).meta["partitioner_tag"] = tag
    with pytest.raises(WorkbenchError, match="node .* counts as forward, and reads .*, which is of the backward"):
        cut(joint)


def gradient_inside(m, x):
    (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return x + slope


def test_a_model_that_dynamo_alone_refuses_is_traced_and_the_refusal_says_so(fake4):
    authored = keeps(gradient_inside, fake4)
    with pytest.raises(WorkbenchError, match='do it outside of the captured module, or try capture "traced"$'):
        capture(authored)
    assert len(capture(authored, by="traced").parameters) == 2


def test_a_buffer_that_the_forward_writes_is_an_output(fake4):
    pair = cut(capture(keeps(lambda m, x: x + m.total.add_(1), fake4), by="traced"))
    assert pair.written == ["total"] and pair.facts.results == 2
