"""How many tokens each expert got, in each step and from each rank, and the bias that evens it out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from workbench.authoring.models.moe import MoE
from workbench.recipe.wording import counted


@dataclass(repr=False)
class ExpertLoad:
    """Counts of a run. layers: module paths, in forward order.

    tokens[step][layer][rank][expert]: copies of that rank's tokens that chose the expert.
    dropped[step][layer][rank]: those of them that found no room.
    """

    layers: list[str]
    tokens: list[list[list[list[int]]]] = field(default_factory=list)
    dropped: list[list[list[int]]] = field(default_factory=list)

    def note(self, counts: list[torch.Tensor]) -> None:
        """Read what `balance` returned for steps, which waits for the device."""
        if counts and self.layers:
            every = torch.stack(counts)
            self.tokens += every[..., :-1].tolist()
            self.dropped += every[..., -1].tolist()

    def by_expert(self, step: int, layer: int) -> list[int]:
        """Copies that reached each expert's queue in a step, of all ranks together."""
        return [sum(rank) for rank in zip(*self.tokens[step][layer], strict=True)]

    def imbalance(self, step: int, layer: int) -> float:
        """The fullest expert's copies over the mean: 1 is even."""
        counts = self.by_expert(step, layer)
        return max(counts) * len(counts) / sum(counts)

    def worst(self, step: int) -> float:
        """The imbalance of the most uneven layer."""
        return max(self.imbalance(step, layer) for layer in range(len(self.layers)))

    def copies(self, step: int) -> int:
        """Copies of all tokens, over all layers and ranks."""
        return sum(n for layer in self.tokens[step] for rank in layer for n in rank)

    def fell(self, step: int) -> int:
        """How many of the step's copies found no room, over all layers and ranks."""
        return sum(n for layer in self.dropped[step] for n in layer)

    def summary(self) -> str:
        """One line: the fullest expert over the mean, and dropped copies, in the first step and the last."""
        if not self.tokens or not self.layers:
            return "no step has been noted"
        first, last = 0, len(self.tokens) - 1
        steps = dict.fromkeys((first, last))
        uneven = " to ".join(f"{self.worst(step):.2f}" for step in steps)
        lost = "no copy dropped"
        if any(map(self.fell, range(last + 1))):
            lost = "dropped " + " to ".join(f"{self.fell(step):,}" for step in steps) + \
                f" of {self.copies(last):,} copies a step"
        return f"fullest expert over the mean {uneven}, {lost}"

    def __repr__(self) -> str:
        sizes = [counted(len(self.layers), "layer"), counted(len(self.tokens), "step")]
        if self.tokens and self.layers:
            ranks = self.tokens[0][0]
            sizes += [counted(len(ranks), "rank"), counted(len(ranks[0]), "expert")]
        return f"ExpertLoad({', '.join(sizes)}: {self.summary()})"


def routed_layers(module: nn.Module) -> dict[str, MoE]:
    """Module path to mixture of experts, in forward order."""
    return {path: part for path, part in module.named_modules() if isinstance(part, MoE)}


def balance(module: nn.Module) -> torch.Tensor:
    """Move each router's bias towards an even load of the step just run. Returns its counts, which are not read yet:
    (layers, ranks, experts + 1), the copies of each expert and the dropped ones.

    Every rank calls it: one all-gather. An expert with more copies than the mean loses `balance_rate`, one with fewer
    gains it. Source: arXiv:2412.19437, section 2.1.2.
    """
    layers = list(routed_layers(module).values())
    if not layers:
        return torch.empty(0)
    mine = torch.stack([torch.cat((layer.tokens, layer.dropped.unsqueeze(0))) for layer in layers])
    ranks = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
    every = torch.stack(ranks, dim=1)  # layers, ranks, experts and the dropped
    total = every[:, :, :-1].sum(1).double()
    steps = (total.mean(1, keepdim=True) - total).sign()
    for layer, step in zip(layers, steps, strict=True):
        bias = layer.router.bias
        bias += layer.config.balance_rate * step.to(bias.dtype)
    return every
