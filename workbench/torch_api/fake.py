"""Fake process groups and fake tensors: private names of torch, in one place."""

from __future__ import annotations

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeTensor", "FakeTensorMode", "new_fake_mode", "start_fake_process_group"]


def start_fake_process_group(size: int, rank: int) -> None:
    """Make this process rank `rank` of a default group of `size` whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have a shape, a dtype and a device, and no storage.

    Real inputs are allowed so that a user's constant in a forward does not stop a capture.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)
