"""The output layer and the cross entropy in pieces of the tokens, as a module and as a function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from workbench.authoring.plans import AuthoringError

IGNORED = -100
"""A target that has no loss, as in `cross_entropy`."""


class OutputLoss(nn.Linear):
    """The output layer with its loss, in pieces of the tokens: see `chunked_cross_entropy`.

    chunks: their number, 2 or more, also as the text that a recipe's `model.loss` has behind the last colon.
    """

    def __init__(self, dim: int, vocab_size: int, chunks: int | str = 8) -> None:
        super().__init__(dim, vocab_size, bias=False)
        if not str(chunks).isdigit() or int(chunks) < 2:
            raise AuthoringError(f"model.loss: {chunks!r} is no number of pieces: give 2 or more, as in OutputLoss:8")
        self.chunks = int(chunks)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x (batch, seq, dim), targets (batch, seq) -> a scalar."""
        return chunked_cross_entropy(x.flatten(0, 1), self.weight, targets.flatten(), self.chunks)


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int
) -> torch.Tensor:
    """x (tokens, dim), weight (vocabulary, dim), targets (tokens,) -> the mean cross entropy of x weight^T, a scalar.

    In float32; float64 stays. Whole logits never exist: of each piece of the tokens the logits, the loss and at once
    the gradients are computed, before the next one's. The forward does not know the gradient of the loss, which is a
    factor of all others: the pieces take 1 for it, and the backward multiplies by it. So the backward reads neither
    logits nor the weight, and nothing is computed twice. The weight's gradient is summed in the order of the pieces,
    in its own dtype: in bfloat16 each piece adds a rounding. AuthoringError where ranks share the vocabulary.
    """
    if isinstance(weight, DTensor):
        raise AuthoringError("a loss in pieces needs the whole vocabulary on each rank, and the ranks of the tp axis "
                             "share it: set mesh.tp to 1, or model.loss to whole")
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
