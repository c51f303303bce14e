"""Private names of fake process groups and fake tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.torch_api.ops import is_symbolic

__all__ = ["FakeTensor", "FakeTensorMode", "cached", "new_fake_mode", "start_fake_process_group",
           "unset_fake_temporarily", "without_log"]


def start_fake_process_group(size: int, rank: int) -> None:
    """Make this process rank `rank` of a default group of `size` whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have a shape, a dtype and a device, but no memory.

    Real inputs are allowed, so that a constant in a user's forward does not stop a capture.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def cached(graph: Graph, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Inside, the graph's fake mode caches an operator's result on equal values, which Dynamo's capture turned off.

    mode: for a graph whose placeholders have no fake values. A graph with sizes read from a device is not cached, since
    each reading gives a new size.
    """
    values = [n.meta.get(key) for n in graph.nodes for key in ("val", "example_value")]
    mode = mode or detect_fake_mode([n.meta.get("val") for n in graph.find_nodes(op="placeholder")])
    with (
        mock.patch.object(mode, "cache_enabled", not is_symbolic(values))
        if mode
        else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Inside, torch does not also log the traceback of an operator that raises on fake values."""
    with mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", True):
        yield
