"""Small models under FSDP on two ranks, captured and split."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.distributed import init_device_mesh

from workbench.authoring.author import author_module
from workbench.authoring.simple_fsdp import Precision
from workbench.graph.capture import capture
from workbench.graph.partition import ForwardBackward, partition
from workbench.pipeline.run_passes import run_joint
from workbench.world.mesh import World


class Stack(nn.Sequential):
    """Layers, and a loss: the mean of the squared output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def linears(*widths: int) -> Stack:
    """Linear layers from each width to the next."""
    return Stack(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


def captured(
    model: Callable[[], nn.Module], rows: int, width: int, world: World, *, reshard: bool = False
) -> ForwardBackward:
    """Forward and backward in bfloat16, with FSDP over the two ranks of `world` and a batch of [rows, width].

    reshard: the backward gathers the weights again.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    with torch.device("meta"):
        plain = model()
    with world.fake_mode:
        batch = (torch.empty(rows, width, dtype=torch.bfloat16),)
    authored = author_module(plain, world, mesh, precision=Precision(param=torch.bfloat16))
    joint = capture(authored, batch=batch)
    if reshard:
        run_joint(joint, ["reshard_after_forward"])
    return partition(joint)
