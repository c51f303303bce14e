"""Traced captures: where recomputation is placed, the faults that its check must find, and training on ranks."""

import pytest
import torch
from graphs_by_hand import OFFLOADS
from on_ranks import calls, insert, small, user_pass

from workbench import WorkbenchError, author, author_module, capture, run_joint
from workbench.graph.read.nodes import is_backward, output_values
from workbench.lab.traced_capture import checks
from workbench.lab.traced_capture.cut import AGAIN, cut
from workbench.pipeline.progress import Post
from workbench.recipe.recipe import load_recipe
from workbench.recipe.sections import PassSpec
from workbench.torch_api import aot
from workbench.torch_api.ops import op_name
from workbench_lessons.l17_two_captures.compare import compare_captures, on_rank

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


def test_resharding_gathers_again_in_the_backward_and_saves_no_gathered_weight(traced):
    joint = after(traced, "reshard_after_forward")
    pair = cut(joint)
    gathers = [n for n in repeats(pair) if "all_gather" in str(n.target)]
    tagged = [n for n in joint.graph.graph.nodes if "all_gather" in str(n.target) and not is_backward(n)]
    assert 0 < len(gathers) <= len(tagged)
    assert checks.of_pair(joint.graph, pair.backward).outcome == "PASS"


def reads_another_value(kept, pair):
    node = next(n for n in repeats(pair) if op_name(n.target) == "aten.mm")
    other = next(n for n in pair.backward.graph.nodes if n is not node.args[0] and n.op == "call_function"
                 and n < node and isinstance(n.meta.get("val"), torch.Tensor))
    node.replace_input_with(node.args[0], other)


def was_overwritten(kept, pair):
    read, end = repeated_from(kept, pair)
    with kept.graph.inserting_before(end):
        written = kept.graph.call_function(torch.ops.aten.mul_.Scalar, (read, 2))
    written.meta = {"val": read.meta["val"], "partitioner_tag": "is_forward"}


def was_freed(kept, pair):
    from torch._functorch._activation_offloading import offload_ops  # noqa: F401  # which registers the operators

    read, end = repeated_from(kept, pair)
    with kept.graph.inserting_before(end):
        host = kept.graph.call_function(torch.ops.ao.offload.default, (read,))
        wait = kept.graph.call_function(torch.ops.ao.wait_tensor.default, (host, read))
    for node in (host, wait):
        node.meta = {"val": read.meta["val"], "partitioner_tag": "is_forward"}


def repeated_from(kept, pair):
    """What a repeated node reads of the forward's values, and the first node of the backward."""
    node = next(n for n in repeats(pair) if n.all_input_nodes and n.all_input_nodes[0].op == "placeholder"
                and aot.parameter_of(n.all_input_nodes[0]) is None)
    read = next(n for n in kept.graph.nodes if n.name == node.meta[AGAIN]).all_input_nodes[0]
    return read, next(n for n in kept.graph.nodes if is_backward(n) and n.op == "call_function")


def misses_a_gradient(kept, pair):
    output = pair.backward.graph.output_node()
    values, descs = output_values(pair.backward), output.meta["desc"]
    output.args, output.meta["desc"] = (tuple(values[1:]),), descs[1:]


def saves_a_tagged_one(kept, pair):
    """As if a product that the cut saves had been tagged."""
    node = next(n for n in kept.graph.nodes if op_name(n.target) == "aten.mm" and n.meta.get("recompute"))
    repeat = next(n for n in repeats(pair) if n.meta[AGAIN] == node.name)
    with pair.backward.graph.inserting_before(repeat):
        saved = pair.backward.graph.placeholder(node.name)
    saved.name, saved.meta = node.name, dict(node.meta)
    repeat.replace_all_uses_with(saved)
    pair.backward.graph.erase_node(repeat)


@pytest.mark.parametrize(("fault", "said"), [
    (reads_another_value, "is repeated as aten.mm"), (was_overwritten, "has overwritten"),
    pytest.param(was_freed, "has freed", marks=OFFLOADS),
    (misses_a_gradient, "the backward returns no gradient of 'tok_embeddings.weight'"),
    (saves_a_tagged_one, "and the backward gets it from the forward")])
def test_a_fault_of_the_repeats_is_found(traced, fault, said):
    joint = after(traced, AC)
    kept = joint.graph
    pair = cut(joint)
    fault(kept, pair)
    found = checks.of_pair(kept, pair.backward)
    assert found.outcome == "FAIL" and said in found.message


class Acts(torch.nn.Module):
    """A layer, and what `act` does with it."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.act = torch.nn.Linear(4, 4), act

    def forward(self, x):
        return self.act(self, x).square().mean()


def acts(act, world):
    return author_module(Acts(act), world, None, batch=lambda: (torch.ones(2, 4),))


def clamps(m, x):
    with torch.no_grad():
        m.layer.weight.clamp_(-0.1, 0.1)
    return x @ m.layer.weight


REFUSED = [
    (clamps, 'parameter.*: write between the steps.*, or try capture "joint"$'),
    (lambda m, x: m.layer(x.mul_(2)), 'input 1 is written in the forward: .*, or try capture "joint"$'),
    (lambda m, x: m.layer(x).detach(),
     "its forward returns no scalar tensor that depends on a parameter: return the mean loss$"),
]


@pytest.mark.parametrize(("act", "told"), REFUSED)
def test_a_model_that_cannot_be_traced_is_refused_in_a_sentence(fake4, act, told):
    authored = acts(act, fake4)
    with pytest.raises(WorkbenchError, match=f"model Acts: .*{told}"):
        capture(authored, by="traced")
    assert isinstance(authored.module.layer.weight, torch.nn.Parameter) and authored.module.training


def test_a_direction_that_is_wrong_is_named(fake4):
    joint = capture(acts(lambda m, x: m.layer(x).sigmoid(), fake4), by="traced")
    node = next(n for n in joint.graph.graph.nodes if op_name(n.target) == "aten.sigmoid_backward")
    node.meta["partitioner_tag"] = "is_forward"
    with pytest.raises(WorkbenchError, match="node .* counts as forward, and reads .*, which is of the backward"):
        cut(joint)


EXPERTS = load_recipe("deepseek_v3").override({
    "model.n_layers": 2, "data.seq_len": 16, "mesh": {"dp_shard": 2, "ep": 2}, "passes": []})
MEMORY = ({"name": "activation_checkpointing", "policy": "selective"}, "reshard_after_forward")


@pytest.mark.parametrize("recipe", [
    pytest.param(small({"dp_shard": 2}, MEMORY), id="dp_shard 2"),
    pytest.param(small({"tp": 2}), id="tp 2", marks=pytest.mark.nightly),
    pytest.param(EXPERTS, id="experts", marks=pytest.mark.nightly),
])
def test_training_is_bitwise_that_of_the_joint_capture(pool2, recipe):
    found = compare_captures(recipe, world=pool2, steps=2, progress=False)
    assert found.refused == {} and found.verdicts == {"joint": "PASS", "traced": "PASS"}
    assert found.values.outcome == "PASS"
    assert "bitwise the same after 2 steps on 2 ranks" in found.values.message
    assert found.aligned > 300 and "metadata" in {each.kind for each in found.differences}


def halved(gm):
    """Halves a product of a traced graph, whose inputs are parameters and no components of them."""
    if not any("Subclass" in type(n.meta["desc"]).__name__ for n in gm.graph.find_nodes(op="placeholder")):
        node = calls(gm, "aten.mm")[0]
        half = insert(gm, node, torch.ops.aten.mul.Tensor, node, 0.5)
        node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    return gm


def compared_with(recipe, edit):
    with user_pass("own", edit):
        return on_rank(recipe.override({"joint_passes": ["own"]}), Post(None))


@pytest.mark.nightly
def test_values_that_differ_are_a_failure(pool2):
    for found in pool2.run(compared_with, small({"dp_shard": 2}), halved):
        assert found.values.outcome == "FAIL" and "outputs break 'exact'" in found.values.message
