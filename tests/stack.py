"""A few linear layers with FSDP over two ranks, split into forward and backward."""

import random
from itertools import pairwise

import networkx as nx
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
    chance, last = random.Random(seed), len(needs) - 1
    graph = nx.DiGraph((need, node) for node, before in enumerate(needs) for need in before)
    graph.add_nodes_from(range(len(needs)))
    place = {node: (node == last, not fixed[node], chance.random()) for node in range(len(needs))}
    return list(nx.lexicographical_topological_sort(graph, place.__getitem__))
