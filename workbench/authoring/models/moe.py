"""Mixture of experts: a router, stacked experts, and two ways to bring tokens to the ranks that hold them.

Sources: arXiv:2412.19437 (DeepSeek-V3: sigmoid scores, groups, balance by a bias instead of a loss), arXiv:2405.04434
(DeepSeek-V2: softmax scores, shared experts), arXiv:2006.16668 (GShard: static capacity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from workbench.authoring.models.layers import FeedForward
from workbench.torch_api.distributed.experts import (
    all_to_all,
    assume_equal,
    grouped_matmul,
    known_sizes,
)
from workbench.torch_api.inductor.regions import region


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a mixture of experts, and how tokens reach them: dispatch is "dropless" or "capacity".

    A token goes to top_k experts out of its top_groups best of n_groups groups. With `normalise` its weights add up to
    route_scale. Under static capacity an expert has capacity_factor times the rows of an even load. balance_rate: how
    much a router's bias changes after each training step.
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

    `bias` (n_experts) changes the choice and not the weights: raising it for experts that get too few tokens balances
    the load without an auxiliary loss.
    """

    bias: torch.Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.n_experts, bias=False)
        self.register_buffer("bias", torch.zeros(config.n_experts))

    def reset_buffers(self, device: torch.device) -> None:
        """Set the bias to zero: no expert is favoured."""
        self.bias = torch.zeros(self.config.n_experts, device=device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (tokens, dim) -> weights in float32 (float64 stays), and experts int64, each (tokens, top_k)."""
        config, logits = self.config, self.gate(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        scores = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(1)
        experts = best_experts(
            scores.detach() + self.bias, config.top_k, config.n_groups, config.top_groups
        )
        weights = scores.gather(1, experts)
        if config.normalise:
            weights = weights / weights.sum(1, keepdim=True)
        return weights * config.route_scale, experts


def best_experts(
    scores: torch.Tensor, top_k: int, n_groups: int = 1, top_groups: int = 1
) -> torch.Tensor:
    """The `top_k` best columns of scores (tokens, experts), best first, from each row's `top_groups` best groups.

    A group's score is the sum of its two best experts' scores.
    """
    if top_groups < n_groups:
        groups = scores.unflatten(1, (n_groups, -1))
        worth = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(2)
        kept = torch.zeros_like(worth).scatter(1, worth.topk(top_groups).indices, 1.0) > 0
        scores = groups.masked_fill(~kept.unsqueeze(2), -math.inf).flatten(1)
    return scores.topk(top_k).indices


def copies_of(experts: torch.Tensor, count: int) -> torch.Tensor:
    """How often each of `count` experts occurs in experts (n): int64 (count)."""
    return (torch.arange(count, device=experts.device).unsqueeze(1) == experts).sum(1)


class Experts(nn.Module):
    """SwiGLU experts in stacked weights; a rank of the expert-parallel axis `mesh` holds its own part of the stack."""

    mesh: DeviceMesh | None = None

    def __init__(self, dim: int, hidden: int, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(count, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(count, hidden, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(
        self, rows: torch.Tensor, counts: tuple[torch.Tensor, Sequence[int]] | None = None
    ) -> torch.Tensor:
        """rows (experts, capacity, dim), or (rows, dim) with each expert's count of rows -> the same shape."""
        w1, w2, w3 = (weight.transpose(1, 2) for weight in (self.w1, self.w2, self.w3))
        if counts is None:
            return (F.silu(rows @ w1) * (rows @ w3)) @ w2
        hidden = F.silu(grouped_matmul(rows, w1, *counts)) * grouped_matmul(rows, w3, *counts)
        return grouped_matmul(hidden, w2, *counts)


Back = Callable[[torch.Tensor], torch.Tensor]
"""The transformed rows -> (n, dim), in the order of the copies that were sent."""


def send_by_capacity(
    copies: torch.Tensor,
    experts: torch.Tensor,
    counts: torch.Tensor,
    mesh: DeviceMesh | None,
    capacity: int,
) -> tuple[torch.Tensor, None, Back, torch.Tensor]:
    """Static capacity: an expert takes at most `capacity` rows from each rank, and drops the rest.

    copies (n, dim), experts (n) and `copies_of` them -> rows (own experts, ranks x capacity, dim), no counts, since
    every expert has as many rows, the way back, which gives zeros for dropped copies, and how many these are. All
    shapes follow from the batch's, so a graph with it holds no symbolic size.
    """
    order = experts.argsort(stable=True)
    first = (counts.cumsum(0) - counts).index_select(0, experts.index_select(0, order))
    # sorted by expert, a copy's place is its distance from its expert's first copy
    place = torch.empty_like(order).scatter(
        0, order, torch.arange(len(order), device=order.device) - first
    )
    slots = counts.shape[0] * capacity
    slot = torch.where(place < capacity, experts * capacity + place, slots)
    sent = copies.new_zeros(slots + 1, copies.shape[1]).index_put((slot,), copies)[:-1]
    ranks = 1 if mesh is None else mesh.size()
    received = all_to_all(sent, mesh).unflatten(0, (ranks, -1, capacity))

    def back(rows: torch.Tensor) -> torch.Tensor:
        by_rank = rows.unflatten(1, (-1, capacity)).transpose(0, 1).flatten(0, 2)
        return F.pad(all_to_all(by_rank, mesh), (0, 0, 0, 1)).index_select(0, slot)

    return received.transpose(0, 1).flatten(1, 2), None, back, (slot == slots).sum()


def send_dropless(
    copies: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, mesh: DeviceMesh | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, list[int]], Back, torch.Tensor]:
    """Every copy reaches its expert: each step reads from the device how many rows go where.

    copies (n, dim), experts (n) and `copies_of` them -> rows (m, dim) by expert, how many rows each own expert has, on
    the device and on the host, the way back, and 0 dropped copies.
    """
    order = experts.argsort(stable=True)
    ranks = 1 if mesh is None else mesh.size()
    # rows from each rank for each own expert
    theirs = all_to_all(counts, mesh).unflatten(0, (ranks, -1))
    sizes = theirs.sum(0)
    read = torch.cat((counts.unflatten(0, (ranks, -1)).sum(1), theirs.sum(1), sizes))
    n, n_local = copies.shape[0], counts.shape[0] // ranks
    known = known_sizes(read, [n // ranks] * 2 * ranks + [n // n_local] * n_local)
    assume_equal(sum(known[:ranks]), n)
    sent, received = known[:ranks], known[ranks : 2 * ranks]
    rows = all_to_all(copies.index_select(0, order), mesh, received, sent)
    local_experts = torch.arange(sizes.shape[0], device=sizes.device).repeat(ranks)
    expert = local_experts.repeat_interleave(theirs.flatten(), output_size=sum(received))
    grouped = expert.argsort(stable=True)

    def back(rows: torch.Tensor) -> torch.Tensor:
        by_rank = rows.index_select(0, grouped.argsort())
        return all_to_all(by_rank, mesh, sent, received).index_select(0, order.argsort())

    return (
        rows.index_select(0, grouped),
        (sizes, known[2 * ranks :]),
        back,
        torch.zeros_like(counts[0]),
    )


class MoE(nn.Module):
    """Routed experts, and shared ones that compute every token.

    After a step, `tokens` (n_experts) holds how many of this rank's copies were routed to each expert, and `dropped`
    how many of them exceeded the capacity.
    """

    summed_buffers = ("tokens", "dropped")  # of a step's microbatches
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
        """Set the counts to zero."""
        self.register_buffer(
            "tokens", torch.zeros(self.config.n_experts, dtype=torch.int64, device=device), False
        )
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64, device=device), False)

    def send(
        self, copies: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor
    ) -> tuple[Any, ...]:
        """Bring this rank's copies of tokens to the experts, by the configuration's dispatch."""
        config, mesh = self.config, self.experts.mesh
        if config.dispatch == "dropless":
            return send_dropless(copies, experts, counts, mesh)
        capacity = math.ceil(config.capacity_factor * copies.shape[0] / config.n_experts)
        return send_by_capacity(copies, experts, counts, mesh, capacity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, dim) of this rank's own tokens -> the same shape."""
        flat, k = x.flatten(0, 1), self.config.top_k
        weights, experts = self.router(flat)
        with region("dispatch"):
            copies = flat.unsqueeze(1).expand(-1, k, -1).flatten(0, 1)
            chosen = experts.flatten()
            tokens = copies_of(chosen, self.config.n_experts)
            rows, counts, back, dropped = self.send(copies, chosen, tokens)
        with region("compute"):
            rows = self.experts(rows, counts)
        with region("combine"):
            came = back(rows).unflatten(0, (-1, k))
            routed = (came * weights.to(came.dtype).unsqueeze(2)).sum(1)
        with torch.no_grad():
            self.tokens.copy_(tokens)
            self.dropped.copy_(dropped)
        return routed.view_as(x) + self.shared_experts(x)
