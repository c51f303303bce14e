"""Answers to the checkpoints of 000_own_program; kept apart from the notebook."""

import torch


def kept_masks(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mask is computed from this one, which the next batch may have otherwise: ones are not enough."""
    return {"attention_mask": torch.ones_like(tokens)}
