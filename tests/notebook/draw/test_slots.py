"""Slots as pictures: the text form holds the facts of every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from workbench import simulated_world
from workbench.notebook import draw


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
