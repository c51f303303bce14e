"""torch's process-wide switch for deterministic algorithms and its generators, as contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms inside, as they were outside."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted or before, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers start at `seed` inside, and go on outside as if nothing had been drawn; of this rank's device."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
