"""The loss in pieces: the same loss and gradients, no whole logits, nothing computed twice, and each refusal."""

import pytest
import torch
from on_ranks import FSDP_TP, calls, small, trajectory
from torch import nn
from torch.nn import functional as F

from workbench import Batches, WorkbenchError, as_backend, author, capture, current_world, partition, run_joint
from workbench.graph.read.peak import estimated_bytes
from workbench.lab.chunked_loss.loss import ChunkedLoss, OutputWeight

pytestmark = pytest.mark.integration
DIM, VOCABULARY = 8, 24


class Head(nn.Module):
    def __init__(self, chunks):
        super().__init__()
        self.output, self.loss = OutputWeight(DIM, VOCABULARY, bias=False), ChunkedLoss(chunks)

    def forward(self, x, targets):
        return self.loss(self.output(x), targets)


def in_pieces(chunks, dtype, compiled):
    """(loss, gradient of x, gradient of the weight) in pieces, and at once; 12 tokens, one without a target."""
    torch.manual_seed(0)
    layer = Head(chunks).to(dtype)
    x, targets = torch.randn(3, 4, DIM, dtype=dtype, requires_grad=True), torch.randint(VOCABULARY, (3, 4))
    targets[1, 2] = -100
    step = torch.compile(layer, backend=as_backend(["inductor_decomposition"]), dynamic=False) if compiled else layer
    whole = x.flatten(0, 1) @ layer.output.weight.t()
    losses = step(x, targets), F.cross_entropy(whole if dtype is torch.float64 else whole.float(), targets.flatten())
    return [(loss.detach(), *torch.autograd.grad(loss * 0.3, (x, layer.output.weight))) for loss in losses]


@pytest.mark.parametrize(("chunks", "dtype", "compiled", "most"), [
    (5, torch.float64, False, 1e-12),  # five pieces have no equal sizes
    (12, torch.float64, True, 1e-12),
    (4, torch.bfloat16, False, 2**-8 * 4**0.5),  # each piece adds a rounding
])
def test_in_pieces_loss_and_gradients_are_those_at_once(chunks, dtype, compiled, most):
    for pieces, whole in zip(*in_pieces(chunks, dtype, compiled), strict=True):
        assert pieces.dtype == whole.dtype
        assert float((pieces - whole).double().norm() / whole.double().norm()) < most


def form(chunks):
    return f"workbench.lab.chunked_loss.loss:in_pieces:{chunks}"


def test_whole_logits_never_exist_and_the_backward_computes_none(fake4):
    sizes = {"model.vocab_size": 8192, "data.seq_len": 512}
    graph = capture(author(small({"dp_shard": 4}).override({"model.loss": form(8), **sizes}), fake4))
    run_joint(graph, ["inductor_decomposition", "reshard_after_forward"])
    pair = partition(graph)
    found = estimated_bytes(*pair.graphs)
    products = [n.meta["val"] for gm in pair.graphs for n in calls(gm, "aten.mm") if n.meta["val"].shape[-1] == 8192]
    assert [value.shape[0] for value in products] == [128] * 8
    assert max(found["peak_forward"], found["peak_backward"]) < 8 * products[0].nbytes  # those of whole logits
    # the weight is not gathered again for the backward
    assert not [n for n in calls(pair.backward, "_c10d_functional.wait_tensor") if 8192 in n.meta["val"].shape]


def first_loss_and_steps():
    """(the first loss at once, two steps in pieces)."""
    recipe = small({"dp_shard": 2}).override({"training.steps": 2})
    whole = author(recipe, current_world())
    return float(whole.module(*Batches(whole).at(0))), trajectory(recipe.override({"model.loss": form(4)}))


@pytest.mark.ranks
def test_on_ranks_steps_in_pieces_are_those_at_once(pool2):
    for loss, pieces in pool2.run(first_loss_and_steps):
        assert pieces["relative"] < 5e-6 and pieces["losses"][0] == pytest.approx(loss, rel=5e-6)


def test_what_cannot_be_cut_is_refused(fake4):
    for chunks, mesh, said in [("1", {"dp_shard": 4}, "'1' is no number of pieces: give 2 or more"),
                               ("many", {"dp_shard": 4}, "'many' is no number of pieces"),
                               ("4", FSDP_TP, "the ranks of tp share it: set mesh.tp to 1")]:
        with pytest.raises(WorkbenchError, match=f"model.loss: .*{said}"):
            author(small(mesh).override({"model.loss": form(chunks)}), fake4)
