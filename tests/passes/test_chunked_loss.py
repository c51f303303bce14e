"""chunked_loss: the same loss and gradients, no whole logits, nothing computed twice, and every fault told."""

from __future__ import annotations

import pytest
import torch
from on_ranks import FSDP_TP, build_with, calls, outcomes, small
from torch import nn
from torch.nn import functional as F

from workbench import WorkbenchError, as_backend, author, capture, partition, run_joint
from workbench.graph.read.peak import estimated_bytes
from workbench.lab.chunked_loss.piece import PIECE
from workbench.lab.chunked_loss.transform import chunked, computed_once
from workbench.pipeline.run_passes import choose
from workbench.recipe.contracts import Stage, check_passes
from workbench.recipe.sections import PassSpec
from workbench.torch_api.partitioning import IN_FORWARD

pytestmark = pytest.mark.integration
DECOMPOSE, NAME = "inductor_decomposition", "chunked_loss"
FSDP = {"dp_shard": 4}


def pieces(number):
    return PassSpec(name=NAME, options={"chunks": number})


def options_of(number):
    return choose(pieces(number), (Stage.JOINT,), "here")[1]


class Head(nn.Module):
    """The loss of x (batch, seq, 8) over 24 tokens, with the weight of a linear layer or of a plain product."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.randn((24, 8) if form == "linear" else (8, 24)))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.form == "flat":
            return F.cross_entropy(x.flatten(0, 1) @ self.weight, targets.flatten())
        logits = F.linear(x, self.weight) if self.form == "linear" else x @ self.weight
        if self.form == "capped":
            logits = 5 * torch.tanh(logits / 5)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def grown(module, x, targets, scale=1.0):
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    loss = module(x, targets)
    (loss * scale).backward()
    return loss.detach(), x.grad, module.get_parameter("weight" if isinstance(module, Head)
                                                       else "_orig_mod.weight").grad.clone()


@pytest.mark.parametrize("form", ["linear", "plain", "flat", "capped"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_loss_and_gradients_are_those_of_eager(form, scale):
    torch.manual_seed(0)
    head = Head(form)
    x, targets = torch.randn(3, 4, 8), torch.randint(24, (3, 4))
    targets[1, 2] = -100  # padding
    backend = as_backend([DECOMPOSE, pieces(4)], strict=True)
    compiled = torch.compile(head, backend=backend, dynamic=False)
    for ours, eager in zip(grown(compiled, x, targets, scale), grown(head, x, targets, scale), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    assert backend.records[-1].verdict("effect").outcome == "PASS"


def test_a_bfloat16_head_agrees_within_a_rounding_a_piece():
    torch.manual_seed(0)
    head = Head("linear").bfloat16()
    x, targets = torch.randn(4, 8, 8).bfloat16(), torch.randint(24, (4, 8))
    compiled = torch.compile(head, backend=as_backend([DECOMPOSE, pieces(8)]), dynamic=False)
    for ours, eager in zip(grown(compiled, x, targets), grown(head, x, targets), strict=True):
        assert float((ours - eager).float().norm() / eager.float().norm()) < 2**-8 * 8**0.5


@pytest.fixture(scope="module", params=["joint", "traced"])
def joint(request, fake4):
    """llama3 of one layer, decomposed, in a microbatch of 32 tokens; and how to partition it."""
    found = capture(author(small(FSDP), fake4), by=request.param)
    run_joint(found, [DECOMPOSE])
    return found, partition


def test_only_one_piece_of_the_logits_exists_and_the_forward_has_all_of_it(joint):
    given, split = joint
    own = given.fork()
    (record,) = run_joint(own, [pieces(4)])
    pair = split(own)
    assert {v.check: v.outcome for v in record.verdicts} == dict.fromkeys(("lint", "effect", "collectives"), "PASS")
    told = next(v for v in record.verdicts if v.check == "effect").evidence
    assert told["chunks"] == 4 and told["logits_bytes"][1] * 4 == told["logits_bytes"][0]
    products = [n for n in calls(pair.forward, "aten.mm") if n.meta.get(PIECE) is not None]
    assert [n.meta["val"].shape[0] for n in products if n.meta["val"].shape[-1] == 256] == [8] * 4
    assert len(calls(pair.forward, "aten.addmm")) == 3  # the weight's gradient, summed in the pieces' order
    assert not [n for n in pair.backward.graph.nodes if n.meta.get("val") is not None and PIECE in n.meta
                and n.op == "call_function"]


@pytest.mark.nightly
def test_with_llama3s_vocabulary_the_estimated_peak_is_less_than_half(fake4):
    recipe = small(FSDP).override({"model.vocab_size": 128_256, "precision.param": "bfloat16",
                                   "data.seq_len": 2048, "data.batch_per_rank": 4})
    given, peaks = capture(author(recipe, fake4)), []
    run_joint(given, [DECOMPOSE])
    for listed in ([], [pieces(8)]):
        own = given.fork()
        run_joint(own, listed)
        peaks.append(estimated_bytes(*partition(own).graphs))
    was, now = peaks
    assert max(now["peak_forward"], now["peak_backward"]) < max(was["peak_forward"], was["peak_backward"]) / 2
    assert now["saved"] < was["saved"] / 2


def test_the_gathered_weight_is_not_gathered_again_in_the_backward(joint):
    given, split = joint
    gathers = []
    for listed in ([], [pieces(4)]):
        own = given.fork()
        run_joint(own, [*listed, "reshard_after_forward"])
        gathers.append(len(calls(split(own).backward, "_c10d_functional.all_gather_into_tensor")))
    assert gathers[1] == gathers[0] - 1


def test_without_its_tag_the_cut_would_move_pieces_to_the_backward_and_the_effect_says_so(fake4):
    found = capture(author(small(FSDP).override({"data.seq_len": 8}), fake4))
    run_joint(found, [DECOMPOSE, pieces(8)])
    for node in found.graph.graph.nodes:
        if node.meta.get("partitioner_tag") == IN_FORWARD:
            node.meta["partitioner_tag"] = "is_forward"
    told = computed_once(partition(found).graphs, None)
    assert not told.happened and "the backward computes" in told.reason


def test_the_effect_tells_where_whole_logits_or_pieces_are_left(joint):
    graph = joint[0].graph
    assert "0 pieces" in chunked((graph,), (graph,), options_of(4)).reason
    own = joint[0].fork()
    run_joint(own, [pieces(4)])
    assert "4 pieces are computed, and 8" in chunked((graph,), (own.graph,), options_of(8)).reason


@pytest.mark.parametrize(("number", "said"), [
    (5, "5 chunks do not divide the 32 tokens of a microbatch: take one of 2, 4, 8, 16, 32"),
    (1, "greater than or equal to 2"),
])
def test_a_number_of_chunks_that_cannot_be_is_refused(joint, number, said):
    with pytest.raises(WorkbenchError, match=said):
        run_joint(joint[0].fork(), [pieces(number)])


@pytest.mark.nightly
def test_a_vocabulary_on_several_ranks_is_refused(fake4):
    found = capture(author(small(FSDP_TP), fake4))
    run_joint(found, [DECOMPOSE])
    with pytest.raises(WorkbenchError, match="would need collectives of its own, such as all_reduce in loss.*mesh.tp"):
        run_joint(found, [NAME])


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 24))

    def forward(self, x):
        return (x @ self.weight).square().mean()


class Shows(Head):
    def forward(self, x, targets):
        logits = x.flatten(0, 1) @ self.weight
        return F.cross_entropy(logits, targets.flatten()), logits


@pytest.mark.parametrize(("module", "batch", "said"), [
    (Squares(), (torch.randn(4, 8),), "no loss of that form is in the graph"),
    (Shows("plain"), (torch.randn(1, 4, 8), torch.randint(24, (1, 4))), "the graph returns mm.*the logits' size"),
])
def test_a_graph_without_such_a_loss_is_refused(module, batch, said):
    compiled = torch.compile(module, backend=as_backend([DECOMPOSE, pieces(2)]), dynamic=False)
    with pytest.raises(Exception, match=said):
        compiled(*batch)


def test_an_operator_that_mixes_tokens_is_refused():
    class Mixes(Head):
        def forward(self, x, targets):
            logits = x.flatten(0, 1) @ self.weight
            return F.cross_entropy(logits - logits.cumsum(0), targets.flatten())

    compiled = torch.compile(Mixes("plain"), backend=as_backend([DECOMPOSE, pieces(2)]), dynamic=False)
    with pytest.raises(Exception, match="aten.cumsum, stands between logits and loss"):
        compiled(torch.randn(1, 4, 8), torch.randint(24, (1, 4)))


def test_it_needs_the_decomposition_before_it():
    assert check_passes([NAME], []) == [f"pass '{NAME}' requires '{DECOMPOSE}': add it to joint_passes, before it"]


def lost(gm):
    """The last piece's part of the weight's gradient is left out."""
    last = calls(gm, "aten.addmm")[-1]
    last.replace_all_uses_with(last.args[0])
    return gm


def twice(gm):
    """The last piece reads the tokens of the one before."""
    own = [n for n in calls(gm, "aten.slice") if n.meta.get(PIECE) == 3]
    for node in own:
        node.args = (*node.args[:2], *(at - 8 for at in node.args[2:]))
    return gm


def unscaled(gm):
    """The gradients are not multiplied by that of the loss."""
    for node in calls(gm, "aten.mul"):
        if any(n.op == "placeholder" and n.name.startswith("tangents") for n in node.all_input_nodes):
            node.replace_all_uses_with(node.args[0])
    return gm


FAULTS = {"lost": lost, "twice": twice, "unscaled": unscaled}


def found_with(fault):
    built = build_with(small({"dp_shard": 2}, joint=(DECOMPOSE, pieces(4).as_toml())), "fault", FAULTS[fault])
    return outcomes(built, NAME), outcomes(built, "fault")


@pytest.mark.ranks
@pytest.mark.parametrize("fault", [
    "lost", pytest.param("twice", marks=pytest.mark.nightly), pytest.param("unscaled", marks=pytest.mark.nightly)])
def test_numerics_finds_each_fault_of_the_pieces_and_none_in_the_pass(pool2, fault):
    for sound, faulty in pool2.run(found_with, fault):
        assert sound["numerics"][0] == "PASS" and "bound 5.0e-06" in sound["numerics"][1]
        assert faulty["numerics"][0] == "FAIL" and "outputs break 'exact'" in faulty["numerics"][1]


