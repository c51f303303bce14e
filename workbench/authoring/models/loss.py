"""Cross entropy over a whole vocabulary, or over one that is sharded on the tensor-parallel axis."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F


class CrossEntropy(nn.Module):
    """Mean cross entropy. With a 1-D `mesh`, each rank holds the logits of its part of the vocabulary."""

    mesh: DeviceMesh | None = None

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """logits (batch, seq, vocabulary or this rank's part of it), targets (batch, seq) -> a scalar.

        In float32; float64 stays.
        """
        logits, targets = logits.flatten(0, 1), targets.flatten()
        if self.mesh is None:
            return F.cross_entropy(_exact(logits), targets)
        return vocabulary_parallel(logits, targets, self.mesh)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _reduced(x: torch.Tensor, mesh: DeviceMesh, op: str) -> torch.Tensor:
    """The sum or maximum of x over the ranks, on every rank; each rank gets the gradient unchanged."""
    return (
        DTensor.from_local(x, mesh, [Partial(op)], run_check=False)
        .redistribute(mesh, [Replicate()])
        .to_local()
    )


def vocabulary_parallel(
    logits: torch.Tensor, targets: torch.Tensor, mesh: DeviceMesh
) -> torch.Tensor:
    """Mean cross entropy of logits (n, vocabulary / ranks) that are sharded over `mesh`, without gathering them.

    Every target must be a token: for others, such as -100 in a padded batch, the result is wrong without an error.
    Each rank normalises its own part and corrects it by the parts' sums: two reductions of n numbers. Source:
    arXiv:1909.08053, section 3.
    """
    size = logits.shape[1]
    every = torch.arange(size * mesh.size(), device=logits.device)
    mine = (
        DTensor.from_local(every, mesh, [Replicate()], run_check=False)
        .redistribute(mesh, [Shard(0)])
        .to_local()
    )
    index = targets - mine[0]
    in_part = (index >= 0) & (index < size)
    index = index.clamp(0, size - 1)
    # the target's logit minus its log-softmax is the part's normaliser; picking the logit before the exact cast keeps
    # the logits for the backward in their own dtype
    column = -_exact(F.nll_loss(logits, index, reduction="none"))
    part = column + F.nll_loss(F.log_softmax(_exact(logits), 1), index, reduction="none")
    most = _reduced(part.detach(), mesh, "max")
    sums = torch.stack(((part - most).exp(), torch.where(in_part, column - most, 0.0)))
    total, target = _reduced(sums, mesh, "sum").unbind()
    return (total.log() - target).mean()
