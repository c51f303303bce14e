"""Answers to the checkpoints of 13_find_the_wrong_pass; kept apart from the notebook."""


def winds() -> tuple[str, str]:
    """South passes, and its effect has a message: the plan says layer.1 where the model has layers.1."""
    return "south", "layer.1"


def stones() -> tuple[str, str]:
    """Coral is the only pass that tags; it tags gathers and waits, and a view behind each wait is saved."""
    return "coral", "permute_6"


def metals() -> tuple[str, str]:
    """Before iron both ranks have the same order; after it, rank 1 gathers layers.0.w1 first."""
    return "iron", "all_gather_into_tensor_1"
