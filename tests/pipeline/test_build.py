"""`build`: every step in one call, what it refuses before it starts, and that it leaves nothing behind."""

import os

import pytest
import torch
import torch.distributed as dist
from graph.test_capture import state
from on_ranks import FSDP4, build_with, calls, insert, outcomes, small, user_pass
from torch import nn

from workbench import Outcome, ParallelPlan, register_model, train
from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.pipeline.build import build, check_buildable
from workbench.torch_api import aot
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration


def test_two_builds_in_one_process_leave_it_as_it_was_and_tell_what_they_know(fake4):
    before = state(), dict(os.environ)
    recipe = small(FSDP4, ("activation_checkpointing", "reshard_after_forward"), ("transformer_block_bucketing",))
    first, second = build(recipe, fake4), build(recipe, fake4, level="full")
    assert before == (state(), dict(os.environ))
    ops = [[str(n.target) for n in b.step.pair.forward.graph.nodes] for b in (first, second)]
    assert ops[0] == ops[1]
    assert list(first.seconds) == ["author", "capture", "joint passes", "partition", "passes", "compile"]
    assert {r.outcome for r in first.records} == {Outcome.PASS} and first.pipeline == []
    assert first.saved_bytes > 0
    assert first.captured is not first.records[-2].after[0]
    assert repr(first).startswith("Built(small on fake: activation_checkpointing PASS, ")
    # a fake world proves no numerics, and says so
    assert {r.verdict("numerics").outcome for r in second.records} == {Outcome.UNKNOWN}
    assert [v.outcome for v in second.pipeline] == [Outcome.UNKNOWN]


def test_a_users_pass_is_held_to_the_rules():
    recipe = small(FSDP4, ("mine", "reshard_after_forward"))
    with user_pass("mine", lambda gm: gm, after={"reshard_after_forward"}), pytest.raises(WorkbenchError) as caught:
        check_buildable(recipe, "gloo")
    assert str(caught.value) == (
        "recipe 'small': joint_passes, passes: pass 'reshard_after_forward' must come before 'mine': swap them")
    with user_pass("mine", lambda gm: gm, needs={"cuda"}):
        with pytest.raises(WorkbenchError, match=r"'mine' needs CUDA \(it runs on a GPU only\), and world gloo has"):
            check_buildable(recipe, "gloo")
        check_buildable(recipe, "fake")  # it shows what stands before


def test_no_compiler_is_said_before_anything_is_captured(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    recipe = small(FSDP4, ("inductor_decomposition",), ("full_inductor_compilation",))
    with pytest.raises(WorkbenchError, match=r"needs a C\+\+ compiler and none was found: install g\+\+"):
        check_buildable(recipe, "gloo")


def test_an_error_leaves_nothing_open(fake4):
    def raises(gm):
        raise ValueError("x")

    before = state()
    with (user_pass("raises", raises, stage="partitioned"),
          pytest.raises(WorkbenchError, match="raised ValueError: x")):
        build(small(FSDP4, (), ("raises",)), fake4)
    assert state() == before


def without_a_norm_weight(gm):
    """The product with the last norm's weight, which is 1 at a step's start, is left out."""
    product = next(n for n in calls(gm, "aten.mul") if n.meta.get("val") is not None and "norm" in str(
        list(n.meta.get("nn_module_stack", {}).values())[-1:]) and n.args[1].op == "call_function"
        and n.args[1].meta["val"].dim() == 1)
    product.replace_all_uses_with(product.args[0])
    gm.graph.erase_node(product)
    return gm


def without_its_gradient(gm):
    """The backward starts from 1, whatever gradient the loss is given."""
    tangent = next(n for n in gm.graph.find_nodes(op="placeholder") if "tangents" in n.name)
    with gm.graph.inserting_after(tangent):
        ones = gm.graph.call_function(torch.ops.aten.ones_like.default, (tangent,))
    ones.meta = {k: v for k, v in tangent.meta.items() if k != "desc"}
    tangent.replace_all_uses_with(ones, delete_user_cb=lambda user: user is not ones)
    return gm


def negates_on_rank_1(gm):
    """Rank 1 errs in the gradient of the target's logit: of tokens in its half of the vocabulary alone."""
    if dist.get_rank() == 1:
        stack = calls(gm, "aten.stack")[-1]
        one, other = stack.args[0]
        stack.args = ([one, insert(gm, other, torch.ops.aten.neg.default, other)], *stack.args[1:])
    return gm


def numerics_of(fault):
    return outcomes(build_with(small({"tp": 2}), "bad", fault), "bad")["numerics"][0]


@pytest.mark.ranks
def test_a_fault_in_the_part_of_the_vocabulary_that_text_never_uses_shows(pool2):
    assert pool2.run(numerics_of, negates_on_rank_1) == ["FAIL"] * 2


def told_of_hidden_faults():
    """The numerics of two passes with a fault each, and whether values stayed as they were."""
    with user_pass("hidden", without_a_norm_weight) as name:
        built = build_with(small({"dp_shard": 2}, (name,)), "other", without_its_gradient)
    weights = [p.to_local() for name, p in built.authored.module.named_parameters() if "norm" in name]
    numerics = [outcomes(built, name)["numerics"][0] for name in ("hidden", "other")]
    return numerics, all(bool((w == 1).all()) for w in weights)


@pytest.mark.ranks
def test_a_fault_behind_a_weight_of_1_or_a_gradient_of_1_shows(pool2):
    assert pool2.run(told_of_hidden_faults) == [(["FAIL", "FAIL"], True)] * 2


class Normed(nn.Module):
    """It has running statistics, a counter of its calls and a buffer that each forward writes."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 256)
        self.register_buffer("total", torch.zeros(8), persistent=False)

    def forward(self, tokens, targets):
        x = self.norm(self.embed(tokens).flatten(0, 1))
        self.total.add_(x.detach().square().sum(0))
        return nn.functional.cross_entropy(self.head(x), targets.flatten())


def normed(*passes):
    """A recipe of that model, which is registered here."""
    plan = ParallelPlan(units=("embed", "norm", "head"))
    register_model("normed", sizes={"vocab_size": 256, "max_seq_len": 16}, plan=plan)(lambda sizes: Normed())
    return small({"dp_shard": 2}, passes=passes).override({"model": {"family": "normed"}, "training.steps": 2})


def left(authored):
    """All that a module holds, as plain data."""
    module = authored.module
    named = (*module.named_parameters(), *module.named_buffers())
    values = {n: getattr(t.detach(), "_local_tensor", t).tolist() for n, t in named}
    return (values, {n: p.grad is None for n, p in module.named_parameters()},
            [m.training for m in module.modules()], torch.get_rng_state().tolist())


def checked_then_trained(recipe):
    """Level full: what differs from a module that nothing has run, then after two steps from eager."""
    plain = author(recipe, current_world())
    before = left(plain)
    built = build(recipe, current_world(), level="full")
    after = left(built.authored)
    told = [str(v) for v in built.pipeline], [str(r.verdict("numerics")) for r in built.records]
    train(plain), train(built.authored, built.step)
    ours, eager = (dict(a.module.named_buffers()) for a in (built.authored, plain))
    return before == after, told, [name for name in eager if not torch.equal(ours[name], eager[name])], list(eager)


@pytest.mark.ranks
def test_level_full_leaves_the_module_as_it_was_and_its_buffers_train_as_eager(pool2):
    recipe = normed("transformer_block_bucketing")
    for same, (pipeline, records), differing, buffers in pool2.run(checked_then_trained, recipe):
        assert same and differing == []
        assert sorted(buffers) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "total"]
        assert pipeline[0].startswith("numerics: PASS") and records[0].startswith("numerics: PASS")


def with_its_update_scaled(recipe):
    """A pass that scales the update of a buffer."""

    def change(gm):
        output = gm.graph.output_node()
        values, descs = list(output.args[0]), output.meta["desc"]
        at = next((i for i, d in enumerate(descs) if aot.written_by(d) == "norm.running_mean"), None)
        if at is None:
            return gm  # the backward
        values[at] = insert(gm, values[at], torch.ops.aten.mul.Tensor, values[at], 1.5)
        output.args = (tuple(values),)
        return gm

    built = build_with(recipe, "wrong", change, stage="partitioned")
    return str(built.records[-1].verdict("numerics")), str(built.pipeline[0])


@pytest.mark.ranks
def test_a_pass_that_changes_a_buffers_update_is_told_with_its_name(pool2):
    for record, pipeline in pool2.run(with_its_update_scaled, normed()):
        assert record.startswith("numerics: FAIL") and "; new value of norm.running_mean: " in record
        assert pipeline.startswith("numerics: FAIL") and "; buffer norm.running_mean: " in pipeline
