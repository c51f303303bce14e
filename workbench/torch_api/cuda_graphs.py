"""Recording and replaying CUDA graphs. Nothing of CUDA is touched before the first recording.

Source: torch/cuda/graphs.py; torch/_inductor/cudagraph_trees.py for what has to be cleared around a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_OPEN: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """The graphs of one step: one memory pool and one stream for all of them."""

    def __init__(self) -> None:
        self._graphs: list[Any] = []
        self._pool: Any = None
        self._stream: Any = None

    def record(self, body: Callable[[list[Any]], Any], inputs: list[Any]) -> tuple[Callable[[], None], list[Any]]:
        """Capture what `body(inputs)` launches: what replays it on the current stream, and the outputs it writes to.

        The graph knows the inputs by their addresses and does not keep them alive.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            _OPEN.add(self)
        graph = torch.cuda.CUDAGraph()
        # workspaces of the side stream would else be made in the pool, and outlive it
        torch._C._cuda_clearCublasWorkspaces()
        # NCCL's watchdog thread queries events meanwhile, which the default mode forbids
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = list(body(list(inputs)))
        torch._C._cuda_clearCublasWorkspaces()
        self._graphs.append(graph)
        return graph.replay, outputs

    def pool_bytes(self) -> int | None:
        """Bytes of device memory that the allocator holds for all graphs recorded so far; None before the first."""
        if self._pool is None:
            return None
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot(self._pool, include_traces=False))

    def close(self) -> None:
        """Free the graphs, and with them the pool; they must be gone before the process groups are."""
        if self._graphs:
            torch.cuda.synchronize()
        while self._graphs:
            self._graphs.pop().reset()
        self._pool = self._stream = None


def close_recorders() -> None:
    """Free every graph of this process: NCCL's communicators do not end while a graph holds them."""
    for recorder in list(_OPEN):
        recorder.close()


def holders(tensor: torch.Tensor) -> int:
    """How many tensors share this tensor's storage, and one for the question."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
