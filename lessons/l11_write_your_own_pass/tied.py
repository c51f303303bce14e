"""The exhibit of the museum: a model whose output weight is its embedding, so one parameter is read twice."""

from __future__ import annotations

import torch
from torch import nn

from workbench import load_recipe, register_model
from workbench.authoring.models.loss import CrossEntropy
from workbench.recipe.recipe import Recipe


class Tied(nn.Module):
    """Embedding [256, 8] and output layer share one weight. Reads tokens and targets, int64; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(256, 8), nn.Linear(8, 256, bias=False)
        self.output.weight, self.loss = self.embed.weight, CrossEntropy()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.output(self.embed(tokens)), targets)


def tied_recipe(ranks: int) -> Recipe:
    """One step of `Tied` under FSDP on `ranks` ranks; registers the model as "tied"."""
    register_model("tied", sizes={"vocab_size": 256, "max_seq_len": 16})(lambda sizes: Tied())
    return load_recipe("llama3").override({
        "name": "tied", "model.family": "tied", "mesh.dp_shard": ranks, "mesh.tp": 1,
        "data.seq_len": 16, "training.steps": 1})
