"""Answers to the checkpoints of 17_two_captures; kept apart from the notebook."""


def modules():
    """The forward's modules by sequence number."""

    def find(rows):
        known = {number: module for _, side, number, module in rows if side == "forward"}
        return {name: known.get(number, "") for name, side, number, _ in rows if side == "backward"}

    return find


def warm_up():
    """The buffer holds the count, and the graph writes it."""

    def counted(m, y):
        m.total.add_(1)
        return m.total * y

    return counted


def tags() -> list[str]:
    """silu and the product again, and the gather of w2, from its shard to the node that the backward reads."""
    return ["silu", "mul", "view_6", "view_7", "all_gather_into_tensor_2", "wait_tensor_2", "view_8", "t_2"]
