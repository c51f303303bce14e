"""Answers to the checkpoints of 02_capture_a_joint_graph; kept apart from the notebook."""


def reads() -> list[str]:
    """Two matmuls read `relu` and the batch, the third the gathered weight of `down` through `t_1`."""
    return ["primals_5", "relu", "t_1"]


def saved_bytes(rows) -> int:
    """Activations grow with the sequence, from 80 tokens to 640; gathered parameters do not."""
    return sum(row.held_bytes * (1 if row.gathered else 8) for row in rows)


def worth_it(start) -> int:
    """Solve g / (inputs + g + r n / 80) = 9 % for n; g: the gathered bytes, r: the bytes that grow with the tokens."""
    inputs, gathered = start["inputs"], start["gathered parameters"]
    grows = start["activations"] + start["other values"]
    return round(80 * (gathered / 0.09 - inputs - gathered) / grows)
