"""A stand-in for CUDA graphs where there is no GPU: what a replay reads, writes and refuses, and none of its speed.

It reads its inputs where they lay when it recorded, and writes into the outputs that it made then, as a CUDA graph
does. Between the two it runs the body again, which a CUDA graph does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from workbench.graph.partition import Partitioned

Pair = TypeVar("Pair", bound=Partitioned)


class Rehearsal:
    """Stands in for the recorder of the cudagraph pass; for tensors of a CPU."""

    def __init__(self) -> None:
        self.recorded = self.closed = 0
        self._made: list[Any] = []
        self._kept: list[Any] = []

    def record(self, body: Callable[[list[Any]], Any], inputs: list[Any]) -> tuple[Callable[[], None], list[Any]]:
        """What replays, and the outputs that it writes to. They hold NaN: a recording computes nothing.

        An old parameter is kept, where a CUDA graph would read whatever lies at its address by then.
        """
        made = set(map(_address, self._made))
        # `p.data = ...` gives a parameter other memory; and held, what the forward saved would look as if in use
        self._kept += [v.detach() for v in inputs if isinstance(v, torch.Tensor) and _address(v) not in made]
        given = set(map(_address, inputs))
        fixed = [_at_address(value) for value in inputs]
        outputs = list(body(list(fixed)))
        fresh = [value for value in outputs if isinstance(value, torch.Tensor) and _address(value) not in given]
        for value in fresh:
            if value.is_floating_point():
                value.fill_(float("nan"))
        self._made += fresh
        self.recorded += 1

        def replay() -> None:
            for kept, new in zip(outputs, body(list(fixed)), strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.copy_(new)

        return replay, outputs

    def pool_bytes(self) -> int | None:
        """Bytes of the outputs recorded so far, each storage once; a GPU's pool also has what lies between."""
        if not self.recorded:
            return None
        return sum({_address(v): v.untyped_storage().nbytes() for v in self._made}.values())

    def close(self) -> None:
        """Let go of what was recorded; may be called twice."""
        self.closed += 1
        self._made, self._kept = [], []


def rehearse(pair: Pair) -> Pair:
    """The same pair; a cudagraph pass that runs on it from now on rehearses on the CPU."""
    pair.facts.recorder = Rehearsal()
    return pair


def _address(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _at_address(value: Any) -> Any:
    """The same memory without holding it, as a graph knows it: by its address."""
    if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
        return value
    storage = value.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())
