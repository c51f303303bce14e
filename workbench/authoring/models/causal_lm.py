"""Wraps a language model that returns logits, such as one of Hugging Face transformers, so that it returns its loss."""

from __future__ import annotations

import torch
from torch import nn

from workbench.authoring.models.loss import CrossEntropy


class CausalLM(nn.Module):
    """The mean cross entropy of `model(input_ids=tokens, use_cache=False).logits`.

    A transformers model built from a config has random weights and needs no download.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = CrossEntropy()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets (batch, seq) int64 -> mean cross entropy, a scalar in float32 (float64 stays)."""
        return self.loss(self.model(input_ids=tokens, use_cache=False).logits, targets)
