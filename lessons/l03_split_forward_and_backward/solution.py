"""Answers to the checkpoints of 03_split_forward_and_backward; kept apart from the notebook."""

from workbench.graph.read.nodes import kind_of, module_path


def no_product_again() -> dict[str, bool]:
    """The backward reads the sum and its silu, and the silu is computed from the sum again."""
    return {"mm": False, "mm_1": False, "add": True, "silu": False}


def budget():
    """All of the feed-forward but its matmuls is recomputed, its three gathers included."""

    def rule(node):
        return False if "feed_forward" in module_path(node) and kind_of(node) != "matmul" else None

    return rule
