"""The output layer and the cross entropy in pieces of the tokens, as a module and as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from workbench.authoring.plans import AuthoringError

if TYPE_CHECKING:
    from workbench.recipe.recipe import Recipe

IGNORED = -100
"""A target that has no loss, as in `cross_entropy`."""


class OutputWeight(nn.Linear):
    """An output layer that leaves its product to the loss."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x (batch, seq, dim) -> (x, weight (vocabulary, dim))."""
        return x, self.weight


class ChunkedLoss(nn.Module):
    """The loss behind an `OutputWeight`, in `chunks` pieces of the tokens."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks = chunks

    def forward(
        self, output: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor
    ) -> torch.Tensor:
        """(activations (batch, seq, dim), weight), targets (batch, seq) -> a scalar."""
        x, weight = output
        return chunked_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), self.chunks)


def in_pieces(model: nn.Module, recipe: Recipe, chunks: str = "8") -> nn.Module:
    """Replace `output` and `loss` of a model, as a recipe's `model.loss` asks for; chunks: 2 or more, as text."""
    if not chunks.isdigit() or int(chunks) < 2:
        raise AuthoringError(
            f"model.loss: {chunks!r} is no number of pieces: give 2 or more, as in in_pieces:8"
        )
    if recipe.mesh.tp > 1:
        raise AuthoringError(
            "model.loss: a loss in pieces needs the whole vocabulary on each rank, and the ranks of "
            "tp share it: set mesh.tp to 1, or model.loss to whole"
        )
    vocabulary, dim = model.get_parameter("output.weight").shape
    model.output, model.loss = OutputWeight(dim, vocabulary, bias=False), ChunkedLoss(int(chunks))
    return model


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int
) -> torch.Tensor:
    """x (tokens, dim), weight (vocabulary, dim), targets (tokens,) -> the mean cross entropy of x weight^T, a scalar.

    In float32; float64 stays. Whole logits never exist: of each piece of the tokens the logits, the loss and at once
    the gradients are computed, before the next one's. The forward does not know the gradient of the loss, which is a
    factor of all others: the pieces take 1 for it, and the backward multiplies by it. So the backward reads neither
    logits nor the weight, and nothing is computed twice. The weight's gradient is summed in the order of the pieces,
    in its own dtype: in bfloat16 each piece adds a rounding.
    """
    loss: torch.Tensor = _InPieces.apply(x, weight, targets, chunks)
    return loss


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        counted = targets != IGNORED
        total = counted.sum()
        classes = torch.arange(weight.shape[0], device=x.device)
        losses, gradients, weight_gradient = [], [], torch.zeros_like(weight)
        pieces = zip(x.chunk(chunks), targets.chunk(chunks), counted.chunk(chunks), strict=True)
        for piece, target, counts in pieces:
            logs = F.log_softmax(_exact(piece @ weight.t()), 1)
            losses.append(F.nll_loss(logs, target, reduction="sum"))
            right = (classes == target[:, None]).to(logs.dtype)
            gradient = ((logs.exp() - right) * counts[:, None] / total).to(x.dtype)
            gradients.append(gradient @ weight)
            weight_gradient = weight_gradient + gradient.t() @ piece
        ctx.save_for_backward(torch.cat(gradients), weight_gradient)
        return torch.stack(losses).sum() / total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x * gradients[0], of_weight * gradients[0], None, None


def _exact(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
