"""Mixture of experts: a router, stacked experts, and two ways to bring tokens to the ranks that hold them.

Sources: arXiv:2412.19437 (DeepSeek-V3: sigmoid scores, groups, balance by a bias instead of a loss), arXiv:2405.04434
(DeepSeek-V2: softmax scores, shared experts), arXiv:2006.16668 (GShard: static capacity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from workbench.authoring.models.layers import FeedForward
from workbench.torch_api.distributed.experts import all_to_all, assume_equal, grouped_matmul, known_sizes
from workbench.torch_api.inductor.regions import region


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a mixture of experts, and how tokens find them: dispatch is "dropless" or "capacity".

    A token goes to top_k experts, out of its top_groups best of n_groups groups. Its weights add up to route_scale
    where `normalise` says so. Under static capacity an expert has capacity_factor times the rows of an even load.
    balance_rate: the step of a router's bias after each training step.
    """

    dim: int = 128
    expert_dim: int = 64
    n_experts: int = 8
    n_shared_experts: int = 1
    top_k: int = 2
    n_groups: int = 4
    top_groups: int = 2
    score: str = "sigmoid"
    normalise: bool = True
    route_scale: float = 1.0
    dispatch: str = "dropless"
    capacity_factor: float = 1.25
    balance_rate: float = 0.001


class Router(nn.Module):
    """Scores each token against each expert, and picks `top_k` experts from the `top_groups` best groups.

    `bias` (n_experts) counts in the choice and not in the weights: raising it for experts that get too few tokens
    balances them without a loss of its own.
    """

    bias: torch.Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.n_experts, bias=False)
        self.register_buffer("bias", torch.zeros(config.n_experts))

    def reset_buffers(self, device: torch.device) -> None:
        """No expert is favoured yet."""
        self.bias = torch.zeros(self.config.n_experts, device=device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (tokens, dim) -> weights in float32 (float64 stays), and experts int64, each (tokens, top_k)."""
        config, logits = self.config, self.gate(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(1)
        experts = best_experts(scores.detach() + self.bias, config.top_k, config.n_groups, config.top_groups)
        weights = scores.gather(1, experts)
        if config.normalise:
            weights = weights / weights.sum(1, keepdim=True)
        return weights * config.route_scale, experts


def best_experts(scores: torch.Tensor, top_k: int, n_groups: int = 1, top_groups: int = 1) -> torch.Tensor:
    """The `top_k` best columns of scores (tokens, experts), best first, from each row's `top_groups` best groups.

    A group is as good as its two best members together.
    """
    if top_groups < n_groups:
        groups = scores.unflatten(1, (n_groups, -1))
        worth = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(top_groups).indices, 1.0) > 0
        scores = groups.masked_fill(~kept.unsqueeze(2), -math.inf).flatten(1)
    return scores.topk(top_k).indices


def copies_of(experts: torch.Tensor, count: int) -> torch.Tensor:
    """How often each of `count` experts stands in experts (n): int64 (count)."""
    return (torch.arange(count, device=experts.device).unsqueeze(1) == experts).sum(1)


class Experts(nn.Module):
    """SwiGLU experts in stacked weights; a rank of the expert-parallel axis `mesh` reads its own part of the stack."""

    mesh: DeviceMesh | None = None

    def __init__(self, dim: int, hidden: int, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(count, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(count, hidden, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, rows: torch.Tensor, counts: tuple[torch.Tensor, Sequence[int]] | None = None) -> torch.Tensor:
        """rows (experts, capacity, dim), or (rows, dim) with each expert's count of rows -> the same shape."""
        w1, w2, w3 = (weight.transpose(1, 2) for weight in (self.w1, self.w2, self.w3))
        if counts is None:
            return (F.silu(rows @ w1) * (rows @ w3)) @ w2
        hidden = F.silu(grouped_matmul(rows, w1, *counts)) * grouped_matmul(rows, w3, *counts)
        return grouped_matmul(hidden, w2, *counts)


@dataclass(frozen=True)
class Capacity:
    """Static capacity: an expert takes at most so many rows from each rank, and what is over is dropped.

    All shapes follow from the batch's, so a graph with it holds no symbolic size.
    """

    n_experts: int
    rows: int
    mesh: DeviceMesh | None

    def send(
        self, copies: torch.Tensor, experts: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """copies (n, dim), experts (n) and `copies_of` them -> rows (own experts, ranks x capacity, dim), the way back,
        and how many fell.
        """
        order = experts.argsort(stable=True)
        first = (mine.cumsum(0) - mine).index_select(0, experts.index_select(0, order))
        # sorted by expert, a copy's place is how far it stands behind its expert's first
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device) - first)
        slots = self.n_experts * self.rows
        slot = torch.where(place < self.rows, experts * self.rows + place, slots)
        sent = copies.new_zeros(slots + 1, copies.shape[1]).index_put((slot,), copies)[:-1]
        ranks = 1 if self.mesh is None else self.mesh.size()
        came = all_to_all(sent, self.mesh).unflatten(0, (ranks, -1, self.rows))
        return came.transpose(0, 1).flatten(1, 2), slot, (slot == slots).sum()

    def counts(self, way: Any) -> None:
        """Every expert has as many rows."""
        return None

    def back(self, rows: torch.Tensor, slot: Any) -> torch.Tensor:
        """What `send` gave, transformed -> (n, dim) in the order of the copies; zeros for those that fell."""
        sent = rows.unflatten(1, (-1, self.rows)).transpose(0, 1).flatten(0, 2)
        came = all_to_all(sent, self.mesh)
        return F.pad(came, (0, 0, 0, 1)).index_select(0, slot)


@dataclass(frozen=True)
class _Way:
    """How dropless rows went: each copy's row before the exchange and after it, and the counts of both."""

    sorted: torch.Tensor
    grouped: torch.Tensor
    sent: list[int]
    received: list[int]
    sizes: torch.Tensor
    counts: list[int]


@dataclass(frozen=True)
class Dropless:
    """Every copy reaches its expert: how many rows go where is read from the device in each step."""

    n_experts: int
    mesh: DeviceMesh | None

    def send(
        self, copies: torch.Tensor, experts: torch.Tensor, mine: torch.Tensor
    ) -> tuple[torch.Tensor, _Way, torch.Tensor]:
        """copies (n, dim), experts (n) and `copies_of` them -> rows (m, dim) by expert, the way back, 0 that fell."""
        order = experts.argsort(stable=True)
        ranks = 1 if self.mesh is None else self.mesh.size()
        theirs = all_to_all(mine, self.mesh).unflatten(0, (ranks, -1))  # rows from each rank for each own expert
        sizes = theirs.sum(0)
        read = torch.cat((mine.unflatten(0, (ranks, -1)).sum(1), theirs.sum(1), sizes))
        n, held = copies.shape[0], self.n_experts // ranks
        known = known_sizes(read, [n // ranks] * 2 * ranks + [n // held] * held)
        assume_equal(sum(known[:ranks]), n)
        sent, received, counts = known[:ranks], known[ranks : 2 * ranks], known[2 * ranks :]
        rows = all_to_all(copies.index_select(0, order), self.mesh, received, sent)
        own = torch.arange(sizes.shape[0], device=sizes.device).repeat(ranks)
        expert = own.repeat_interleave(theirs.flatten(), output_size=sum(received))
        grouped = expert.argsort(stable=True)
        way = _Way(order, grouped, sent, received, sizes, counts)
        return rows.index_select(0, grouped), way, torch.zeros_like(mine[0])

    def counts(self, way: _Way) -> tuple[torch.Tensor, list[int]]:
        """Rows of each own expert, on the device and here."""
        return way.sizes, way.counts

    def back(self, rows: torch.Tensor, way: Any) -> torch.Tensor:
        """What `send` gave, transformed -> (n, dim) in the order of the copies."""
        came = all_to_all(rows.index_select(0, way.grouped.argsort()), self.mesh, way.sent, way.received)
        return came.index_select(0, way.sorted.argsort())


class MoE(nn.Module):
    """Routed experts, and shared ones that every token passes.

    After a step `tokens` (n_experts) holds how many of this rank's copies each expert was chosen for, and `dropped`
    how many of them found no room.
    """

    tokens: torch.Tensor
    dropped: torch.Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config.dim, config.expert_dim, config.n_experts)
        self.shared_experts = FeedForward(config.dim, config.n_shared_experts * config.expert_dim)
        self.reset_buffers(torch.get_default_device())

    def reset_buffers(self, device: torch.device) -> None:
        """Nothing has been counted."""
        self.register_buffer("tokens", torch.zeros(self.config.n_experts, dtype=torch.int64, device=device), False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64, device=device), False)

    def dispatch(self, copies: int) -> Capacity | Dropless:
        """The way to the experts for so many copies of tokens a rank."""
        config, mesh = self.config, self.experts.mesh
        if config.dispatch == "dropless":
            return Dropless(config.n_experts, mesh)
        return Capacity(config.n_experts, math.ceil(config.capacity_factor * copies / config.n_experts), mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) of this rank's own tokens -> the same shape."""
        flat, k = x.flatten(0, 1), self.config.top_k
        weights, experts = self.router(flat)
        with region("dispatch"):
            copies = flat.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
            way_to = self.dispatch(copies.shape[0])
            chosen = experts.flatten()
            counts = copies_of(chosen, self.config.n_experts)
            rows, way, dropped = way_to.send(copies, chosen, counts)
        with region("compute"):
            rows = self.experts(rows, way_to.counts(way))
        with region("combine"):
            came = way_to.back(rows, way).unflatten(0, (-1, k))
            routed = (came * weights.to(came.dtype).unsqueeze(2)).sum(1)
        with torch.no_grad():
            self.tokens.copy_(counts)
            self.dropped.copy_(dropped)
        return routed.view_as(x) + self.shared_experts(x)
