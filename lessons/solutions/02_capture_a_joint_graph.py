"""Answers to the checkpoints of 02_capture_a_joint_graph; kept apart from the notebook."""

from workbench.analysis.memory import saved_tensors


def saved_bytes(pair) -> int:
    """What keeping the saved tensors holds, each storage once; `pair` is the partition's ForwardBackward."""
    return sum(t.held_bytes for t in saved_tensors(pair.forward, pair.backward))
