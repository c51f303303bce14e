"""Answers to the checkpoints of 07_compile_everything; kept apart from the notebook."""

import torch


def one_kernel():
    """Both pointwise operators after the matmul."""
    return lambda x, w, s: torch.relu((x @ w) * s)


def fewer_launches(full) -> list:
    """Two buckets: fewer copies, and the gradients of the last modules leave while the layer's backward runs."""
    plan = [["tok_embeddings", "layers.0"], ["norm", "output"]]
    return [{"name": "transformer_block_bucketing", "buckets": plan}, full]
