"""Deterministic algorithms, a norm with the same bits everywhere, and the random generators of this process."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Inside, deterministic algorithms are on if `wanted`; afterwards setting and environment are as before.

    Torch raises RuntimeError for an operator that has none: with a warning alone, attention on a GPU would add up in
    another order in each run.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    lacks = wanted and _WORKSPACE not in os.environ
    if lacks:
        os.environ[_WORKSPACE] = ":4096:8"  # torch asks for it before a matmul
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        if lacks:
            os.environ.pop(_WORKSPACE, None)


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all tensors together, by the same operators on plain and on fake tensors.

    `torch.nn.utils.get_total_norm` takes one multi-tensor norm of plain tensors, and one norm for each fake tensor.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restores the state of all random generators on exit: torch's, on this rank's device too, Python's and numpy's."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, arrays = random.getstate(), _numpy_random()
    drawn = arrays.get_state() if arrays else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if arrays:
                arrays.set_state(drawn)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers start at `seed` inside, and none outside change."""
    with same_random_numbers():
        torch.manual_seed(seed)
        random.seed(seed)
        if arrays := _numpy_random():
            arrays.seed(seed % 2**32)
        yield


def random_state() -> dict[str, Any]:
    """The state of all random generators of this process, of types that `torch.load(weights_only=True)` reads."""
    arrays, cuda = _numpy_random(), torch.cuda.is_available()
    name, keys, *rest = arrays.get_state() if arrays else ("", (), 0, 0, 0.0)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], *rest) if arrays else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers that `random_state` found; it imports numpy where the state is numpy's, too."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if state["numpy"] is not None:
        import_module("numpy.random").set_state(state["numpy"])


def _numpy_random() -> Any:
    """numpy's random module if numpy has been imported, else None."""
    return getattr(sys.modules.get("numpy"), "random", None)
