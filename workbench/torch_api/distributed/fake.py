"""Fake process groups and fake tensors: private names of torch, in one place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.torch_api.ops import is_symbolic

__all__ = ["FakeTensor", "FakeTensorMode", "cached", "new_fake_mode", "start_fake_process_group",
           "without_log"]


def start_fake_process_group(size: int, rank: int) -> None:
    """Make this process rank `rank` of a default group of `size` whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have a shape, a dtype and a device, and no storage.

    Real inputs are allowed so that a user's constant in a forward does not stop a capture.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def cached(graph: Graph, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Within, an operator runs once on alike values of the graph's fake mode, whose cache Dynamo's capture has off.

    mode: where the placeholders' values do not tell it.
    Sizes that are read from the device are new at each reading, and stay without it.
    """
    values = [n.meta.get(key) for n in graph.nodes for key in ("val", "example_value")]
    mode = mode or detect_fake_mode([n.meta.get("val") for n in graph.find_nodes(op="placeholder")])
    with mock.patch.object(mode, "cache_enabled", not is_symbolic(values)) if mode else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Within, an operator that refuses fake values raises, and torch prints no traceback of it besides."""
    with mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", True):
        yield
