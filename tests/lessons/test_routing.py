"""Routing as a picture: the text form holds the facts of every rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from workbench import simulated_world
from workbench.errors import WorkbenchError
from workbench_lessons.l09_route_tokens_to_experts.pictures import routing

SCORES = torch.tensor([[0.1, 0.9, 0.3, 0.4], [0.8, 0.1, 0.7, 0.2], [0.2, 0.3, 0.6, 0.5]])


def test_choices_are_told_token_by_token():
    lines = routing(SCORES, SCORES.topk(2).indices, 2).text.splitlines()
    assert lines == ["3 tokens on 1 rank, 4 experts in 2 groups: the experts of each token, best first",
                     "rank 0, token 0: e1, e3", "rank 0, token 1: e0, e2", "rank 0, token 2: e2, e3"]


def test_every_simulated_rank_is_in_it_and_tokens_count_on():
    with simulated_world(2) as world:
        own = distribute_tensor(SCORES[:2], world.mesh_of({"ep": 2}), [Shard(0)]).to_local()
        experts = own.topk(1).indices
    said = routing(own, experts)
    assert said.text.splitlines()[1:] == ["rank 0, token 0: e1", "rank 1, token 1: e0"]
    assert "2 tokens on 2 ranks" in said.alt


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(WorkbenchError, match=r"4 experts do not divide by ranks \(1\) and groups \(3\)"):
        routing(SCORES, SCORES.topk(1).indices, 3)
