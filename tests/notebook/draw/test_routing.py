"""Routing and its slots as pictures: the text forms hold the facts of every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from workbench import simulated_world
from workbench.errors import WorkbenchError
from workbench.notebook import draw

SCORES = torch.tensor([[0.1, 0.9, 0.3, 0.4], [0.8, 0.1, 0.7, 0.2], [0.2, 0.3, 0.6, 0.5]])


def test_choices_are_told_token_by_token():
    lines = draw.routing(SCORES, SCORES.topk(2).indices, 2).text.splitlines()
    assert lines == ["3 tokens on 1 rank, 4 experts in 2 groups: the experts of each token, best first",
                     "rank 0, token 0: e1, e3", "rank 0, token 1: e0, e2", "rank 0, token 2: e2, e3"]


def test_every_simulated_rank_is_in_it_and_tokens_count_on():
    with simulated_world(2) as world:
        own = distribute_tensor(SCORES[:2], world.mesh_of({"ep": 2}), [Shard(0)]).to_local()
        experts = own.topk(1).indices
    said = draw.routing(own, experts)
    assert said.text.splitlines()[1:] == ["rank 0, token 0: e1", "rank 1, token 1: e0"]
    assert "2 tokens on 2 ranks" in said.alt


def test_another_choice_is_another_picture():
    best, worst = (draw.routing(SCORES, SCORES.topk(1, largest=large).indices) for large in (True, False))
    assert best.png != worst.png and best.text != worst.text


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(WorkbenchError, match=r"4 experts do not divide by ranks \(1\) and groups \(3\)"):
        draw.routing(SCORES, SCORES.topk(1).indices, 3)


def test_slots_are_told_before_and_after_the_exchange():
    with simulated_world(2) as world:
        sent = distribute_tensor(torch.tensor([0, -1, 1, 0, 2, 3, -1, -1]), world.mesh_of({"ep": 2}), [Shard(0)])
        sent = sent.to_local()
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
    picture = draw.slots([("sent", sent), ("received", came)], capacity=2, per_rank=2)
    assert picture.text.splitlines() == ["sent", "rank 0: 0 . | 1 0", "rank 1: 2 3 | . .",
                                         "received", "rank 0: 0 . | 2 3", "rank 1: 1 0 | . ."]
    assert "sent; received" in picture.alt
    heads = ["e0", "e1"], ["from rank 0", "from rank 1"]
    headed = draw.slots([("sent", sent), ("received", came)], 2, 2, heads=heads)
    assert headed.text == picture.text and headed.height > picture.height
    named = draw.slots([("sent", sent), ("received", came)], 2, 2, heads=heads, rows=[["rank 0", "rank 1"], ["a", "b"]])
    assert named.text == picture.text and named.png != headed.png


def test_a_palette_keeps_the_size_and_saves_bytes():
    from workbench.notebook.draw.colors import RANK_COLORS
    from workbench.notebook.draw.picture import finish, new_figure

    figure = new_figure(6, 3)
    axes = figure.add_subplot()
    for i in range(60):
        axes.text(i % 10 / 10, i // 10 / 6, str(i), color=RANK_COLORS[i % 8])
    every, few = finish(figure, "", ""), finish(figure, "", "", colors=256)
    assert len(few.png) < 0.6 * len(every.png) and (few.width, few.height) == (every.width, every.height)
