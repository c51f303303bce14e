"""A few linear layers with FSDP over two ranks, split into forward and backward."""

import random
from itertools import pairwise

import torch
from torch import nn
from torch.distributed import init_device_mesh

from workbench import Precision, author_module, capture, partition, run_joint


class Stack(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


WIDTHS = (1024, 4096, 2048, 1024, 3072)


def split(world, widths=WIDTHS):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        model = Stack(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    with world.fake_mode:
        batch = (torch.empty(2048, widths[0], dtype=torch.bfloat16),)
    joint = capture(author_module(model, world, mesh, precision=Precision(param=torch.bfloat16)), batch=batch)
    run_joint(joint, ["reshard_after_forward"])  # so that an early gather costs memory
    return partition(joint)


def random_order(needs: list[list[int]], fixed: list[int], seed: int) -> list[int]:
    """Any order of the nodes in which each comes after what it needs; inputs first, the output last."""
    chance = random.Random(seed)
    count = len(needs)
    first = [i for i in range(count - 1) if fixed[i]]
    done, out = set(first), list(first)
    open_ = [i for i in range(count - 1) if i not in done]
    while open_:
        ready = [i for i in open_ if done.issuperset(needs[i])]
        chosen = chance.choice(ready)
        open_.remove(chosen)
        done.add(chosen)
        out.append(chosen)
    return [*out, count - 1]
