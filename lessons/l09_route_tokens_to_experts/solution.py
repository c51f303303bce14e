"""Answers to the checkpoints of 09_route_tokens_to_experts; kept apart from the notebook."""

import math


def two_groups():
    """Hide the scores of all but each token's two best groups, then take the best experts."""

    def choose(scores):
        groups = scores.unflatten(1, (4, 4))
        kept = groups.topk(2).values.sum(2).topk(2).indices
        hidden = groups.new_full(groups.shape, -math.inf)
        rows = kept.unsqueeze(2).expand(-1, -1, 4)
        return hidden.scatter(1, rows, groups.gather(1, rows)).flatten(1).topk(4).indices

    return choose


def exchange_bytes(rank_tokens, dim) -> int:
    """Every slot travels, filled or not: experts x capacity x dim x 4 bytes."""
    capacity = math.ceil(1.25 * rank_tokens * 2 / 16)
    return 16 * capacity * dim * 4


def balance_rate() -> float:
    """Between 0.001, which stays behind the training, and 0.03, which swings."""
    return 0.005


def capacity_factor(usual) -> float:
    """As many even shares as the fullest expert has; `usual` is the training without balance."""
    return usual.load.imbalance(0, 0)
