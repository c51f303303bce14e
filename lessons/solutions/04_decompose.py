"""Answers to the checkpoints of 04_decompose; kept apart from the notebook."""

from torch.nn import functional as F

from workbench import find_nodes


def gate():
    """The backward of the product reads silu(x), so the pattern returns it, too."""

    def pattern(x, y):
        left = F.silu(x)
        return left, left * y

    return pattern


def own_table(plain, table) -> list[str]:
    """The operators of the loss: with them apart, nothing takes the logarithms whole."""
    listed = [n.target for n in find_nodes(plain.graph, module="loss") if n.target in table]
    return sorted({str(target).rpartition(".")[0] for target in listed})


def own_silu():
    """sigmoid(x) = (1 + tanh(x / 2)) / 2."""
    return lambda x: x * (0.5 * (1 + (0.5 * x).tanh()))
