"""Answers to the checkpoints of 12_inside_inductor; kept apart from the notebook."""

import torch


def blocks_peak(tokens, dim, hidden) -> int:
    """Two results as wide as the inside, and a block's output."""
    return (2 * 2 * hidden + dim) * 3 * tokens * 4


def peak(loss):
    """The loss of a quarter of the rows at a time: each part's logits lie where those of the part before lay."""

    def in_parts(x, weight, target):
        parts = zip(x.chunk(4), target.chunk(4), strict=True)
        return torch.cat([loss(rows, weight, wanted) for rows, wanted in parts])

    return in_parts


def traffic():
    """The loss of a quarter of the columns at a time: each part loads its own columns of the weight."""

    def cap(logits):
        return 30 * torch.tanh(logits / 30)

    def by_columns(x, weight, target):
        parts = [torch.logsumexp(cap(x @ some), 1, keepdim=True) for some in weight.chunk(4, 1)]
        chosen = cap((x * weight.T[target[:, 0]]).sum(1, keepdim=True))
        return torch.logsumexp(torch.cat(parts, 1), 1, keepdim=True) - chosen

    return by_columns
