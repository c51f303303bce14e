"""A stand-in for CUDA graphs on a CPU, with the same reads, writes and refusals, but no speed.

Like a CUDA graph, it reads the inputs at their recorded addresses, and writes into the recorded outputs. In between it
runs the body again, which a CUDA graph does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from workbench.graph.partition import Partitioned
from workbench.torch_api.restoring import restoring

Pair = TypeVar("Pair", bound=Partitioned)


class Rehearsal:
    """A stand-in for the recorder of the cudagraph pass, for CPU tensors."""

    def __init__(self) -> None:
        self.recorded = self.closed = 0
        self._outputs: list[Any] = []
        self._kept: list[Any] = []

    def record(
        self, body: Callable[[list[Any]], Any], inputs: list[Any]
    ) -> tuple[Callable[[], None], list[Any]]:
        """The replay as a function, and the outputs that it writes to. They hold NaN: a recording computes nothing.

        A replaced parameter is kept alive. A CUDA graph would read whatever its old memory holds by then.
        """
        output_addresses = set(map(_address, self._outputs))
        # detached: `p.data = ...` would change the memory of `p`. Not what we made: saved tensors would seem in use
        self._kept += [
            v.detach() for v in inputs
            if isinstance(v, torch.Tensor) and _address(v) not in output_addresses
        ]
        input_addresses = set(map(_address, inputs))
        fixed = [_at_address(value) for value in inputs]
        # the step may write its inputs
        with restoring(dict.fromkeys(v for v in fixed if isinstance(v, torch.Tensor))):
            outputs = list(body(list(fixed)))
        fresh = [
            value
            for value in outputs
            if isinstance(value, torch.Tensor) and _address(value) not in input_addresses
        ]
        for value in fresh:
            if value.is_floating_point():
                value.fill_(float("nan"))
        self._outputs += fresh
        self.recorded += 1

        def replay() -> None:
            for old, new in zip(outputs, body(list(fixed)), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        return replay, outputs

    def pool_bytes(self) -> int | None:
        """Bytes of the outputs recorded so far, each storage once. A GPU's pool also holds intermediate values."""
        if not self.recorded:
            return None
        return sum({_address(v): v.untyped_storage().nbytes() for v in self._outputs}.values())

    def close(self) -> None:
        """Release what was recorded. May be called twice."""
        self.closed += 1
        self._outputs, self._kept = [], []


def rehearse(pair: Pair) -> Pair:
    """Make the cudagraph pass rehearse on the CPU when it runs on this pair, and return the pair."""
    pair.facts.recorder = Rehearsal()
    return pair


def _address(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


def _at_address(value: Any) -> Any:
    """A tensor at the same address that does not keep the memory alive, like a CUDA graph's input."""
    if not isinstance(value, torch.Tensor) or not value.untyped_storage().nbytes():
        return value
    storage = value.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=value.dtype)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())
