"""Recording and replaying CUDA graphs. Nothing uses CUDA before the first recording.

Source: torch/cuda/graphs.py; torch/_inductor/cudagraph_trees.py for the workspaces to clear around a recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from workbench.torch_api.devices import host_copies

_OPEN: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """The CUDA graphs of one step, with one memory pool and one stream for all of them."""

    def __init__(self) -> None:
        self._graphs: list[Any] = []
        self._pool: Any = None
        self._stream: Any = None
        self._host: list[torch.Tensor] = []

    def record(
        self, body: Callable[[list[Any]], Any], inputs: list[Any]
    ) -> tuple[Callable[[], None], list[Any]]:
        """Record the launches of `body(inputs)`. Returns the replay on the current stream, and the outputs it writes.

        The graph reads the inputs at their addresses and does not keep them alive.
        """
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            _OPEN.add(self)
        graph = torch.cuda.CUDAGraph()
        # or workspaces of the side stream would be allocated in the pool, and outlive it
        torch._C._cuda_clearCublasWorkspaces()
        # NCCL's watchdog thread queries events in the meantime, which the default mode forbids
        with (
            host_copies.recorded() as buffers,
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = list(body(list(inputs)))
        self._host += buffers
        torch._C._cuda_clearCublasWorkspaces()
        self._graphs.append(graph)
        return graph.replay, outputs

    def pool_bytes(self) -> int | None:
        """Device memory of the pool of all graphs so far, in bytes; None before the first recording."""
        if self._pool is None:
            return None
        return sum(
            s["total_size"] for s in torch.cuda.memory_snapshot(self._pool, include_traces=False)
        )

    def close(self) -> None:
        """Free the graphs and their pool. This must come before the process groups are destroyed."""
        if self._graphs:
            torch.cuda.synchronize()
        while self._graphs:
            self._graphs.pop().reset()
        self._pool = self._stream = None
        self._host.clear()


def close_recorders() -> None:
    """Free every graph of this process: a graph keeps NCCL's communicators alive."""
    for recorder in list(_OPEN):
        recorder.close()


def holders(tensor: torch.Tensor) -> int:
    """The number of references to this tensor's storage, one of which is the query's own."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
