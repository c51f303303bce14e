"""Answers to the checkpoints of 04_decompose; kept apart from the notebook."""

from torch.nn import functional as F


def gate():
    """The backward of the product reads silu(x), so the pattern returns it, too."""

    def pattern(x, y):
        left = F.silu(x)
        return left, left * y

    return pattern


def same_bits() -> list[str]:
    """A view and a choice do not round; leaky_relu rounds its one product, as the whole operator does."""
    return ["t", "clamp", "leaky_relu"]


def own_silu():
    """sigmoid(x) = (1 + tanh(x / 2)) / 2."""
    return lambda x: x * (0.5 * (1 + (0.5 * x).tanh()))
