"""Answers to the checkpoints of 02_capture_a_joint_graph; kept apart from the notebook."""


def reads() -> list[str]:
    """Two matmuls read `relu` and the batch, the third the gathered weight of `down` through `t_1`."""
    return ["primals_5", "relu", "t_1"]


def saved_bytes(rows) -> int:
    """Activations grow with the sequence, from 80 tokens to 640; gathered parameters do not."""
    return sum(row.held_bytes * (1 if row.gathered else 8) for row in rows)


def find_gathered():
    """Follow the views to the owner of the memory, and ask whether that all-gather gathers a parameter."""
    return lambda row, gathers: "ParamAOTInput" in gathers.get(row.root, "")


def worth_it(memory) -> int:
    """Solve g / (inputs + g + a n) = 9 % for n; g: the gathered bytes, a: the bytes for one of the 80 tokens."""
    inputs, gathered = memory.at_backward["inputs"], memory.at_backward["gathered parameters"]
    for_a_token = (memory.peak - inputs - gathered) / 80
    return round((gathered / 0.09 - inputs - gathered) / for_a_token)
