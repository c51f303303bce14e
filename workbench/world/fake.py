"""A world of any size in one process, with shapes and no values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.world.mesh import World, opened


@contextmanager
def fake_world(size: int, rank: int = 0, device: str = "cpu") -> Iterator[World]:
    """Be rank `rank` of `size` ranks that do not exist: collectives return tensors of the right shape.

    Parameters authored here are DTensors around fake tensors and take no memory. WorldError if this process already
    has a default process group. On exit, the process groups and torch's caches of them are removed. device: of all
    tensors; "cuda:0" needs a GPU, though nothing runs on it.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.init()  # or the mesh would make another GPU current for another rank
        torch.cuda.set_device(device)
    with opened(
        "fake_world", World("fake", size, rank, torch.device(device), new_fake_mode())
    ) as world:
        yield world
