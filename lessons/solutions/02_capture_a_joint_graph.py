"""Answers to the checkpoints of 02_capture_a_joint_graph; kept apart from the notebook."""


def reads() -> list[str]:
    """Two matmuls read `relu` and the batch, the third the gathered weight of `down` through `t_1`."""
    return ["primals_5", "relu", "t_1"]


def saved_bytes(rows) -> int:
    """Activations grow with the sequence, from 64 tokens to 512; gathered parameters do not."""
    return sum(row.held_bytes * (1 if row.gathered else 8) for row in rows)


def find_gathered():
    """Follow the views to the owner of the memory, whatever they are called."""
    return lambda row: row.root.startswith("all_gather")


def worth_it(rows, pair, live_bytes) -> int:
    """Solve g / (inputs + g + a n) = 9 % for n; g: the gathered bytes, a: the bytes for one of the 64 tokens."""
    gathered = sum(row.held_bytes for row in rows if row.gathered)
    at = live_bytes(pair.forward)
    for_a_token = (at.peak_bytes - at.input_bytes - gathered) / 64
    return round((gathered / 0.09 - at.input_bytes - gathered) / for_a_token / 4) * 4
