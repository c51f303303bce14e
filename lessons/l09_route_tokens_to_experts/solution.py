"""Answers to the checkpoints of 09_route_tokens_to_experts; kept apart from the notebook."""

import math


def exchange_bytes(rank_tokens, dim) -> int:
    """Every slot travels, filled or not: experts x capacity x dim x 4 bytes."""
    capacity = math.ceil(1.25 * rank_tokens * 2 / 16)
    return 16 * capacity * dim * 4


def balance_rate() -> float:
    """Between 0.0005, which stays behind the training, and 0.03, which swings."""
    return 0.005


def capacity_factor(usual) -> float:
    """As many even shares as the fullest expert has; `usual` is the training without balance."""
    return usual.load.imbalance(0, 0)
