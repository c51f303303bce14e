"""Answers to the checkpoints of 09_route_tokens_to_experts; kept apart from the notebook."""

import math


def exchange_bytes(rank_tokens, n_experts, top_k, dim) -> int:
    """Every slot travels, filled or not: experts x capacity x dim x 4 bytes."""
    capacity = math.ceil(1.25 * rank_tokens * top_k / n_experts)
    return n_experts * capacity * dim * 4


def balance_rate() -> float:
    """The skew takes 8 steps at 0.006, so 5 at 0.01; a step three times as large overshoots for ever."""
    return 0.01


def capacity_factor(uneven) -> float:
    """As many even shares as the fullest expert has; `uneven` is the load of the run without balance."""
    return uneven.imbalance(0, 0)
