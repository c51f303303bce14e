"""Odd modules that keep something in Python between their steps: lists, counters, arrays, generators, gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.models import DIM, written


def held(name: str, change: Callable[[Any, Tensor], Any], kept: Callable[[], Any]) -> None:
    """A module whose attribute `kept` is changed by `change`, which gives a number; the output is scaled by it."""
    written(name, lambda m, x: x * change(m.kept, x), kept=kept)


def appended(kept: Any, x: Tensor) -> int:
    kept.append(x)
    return len(kept)


def inserted(kept: Any, x: Tensor) -> int:
    kept[len(kept)] = x
    return len(kept)


@dataclass
class Calls:
    made: int = 0

    def __call__(self) -> int:
        self.made += 1
        return self.made


held("activations in a list", appended, list)
held("activations in a dictionary", inserted, dict)
held("numbers taken from an iterator", lambda kept, x: next(kept), itertools.count)
written("a generator of Python's random numbers", lambda m, x: x * m.kept.random(), kept=lambda: random.Random(0))
held("an object that counts", lambda kept, x: kept(), Calls)


# attributes of the module


def _array_written(m: Any, x: Tensor) -> Tensor:
    m.array[0] += 1
    return x * torch.from_numpy(m.array)


def _list_rebound(m: Any, x: Tensor) -> Tensor:
    m.kept = [*m.kept, x]
    return x * len(m.kept)


def _losses(m: Any, x: Tensor) -> Tensor:
    m.losses.append(x.square().mean())
    m.losses.append(x.abs().mean())
    total = sum(m.losses)
    m.losses.clear()
    return x * total


def _set_again(m: Any, x: Tensor) -> Tensor:
    m.scale = 2
    return x * m.scale


written("an array that is written", _array_written, array=lambda: np.zeros(DIM, np.float32))
written("a list that is rebound", _list_rebound, kept=list)
written("losses in a list that is emptied", _losses, losses=list)
written("a number that stays", _set_again, scale=lambda: 2)


# outside of the module, and the last step's gradient

SEEN: list[Tensor] = []
CALLS = 0


def _global_list(m: Any, x: Tensor) -> Tensor:
    SEEN.append(x)
    return x * len(SEEN)


def _global_number(m: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def _closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def function(m: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return function


def _by_gradient(m: Any, x: Tensor) -> Tensor:
    return x if m.layer.weight.grad is None else -x


written("a list that is a global", _global_list)
written("a number that is a global", _global_number)
written("a number of a closure", _closure())
written("a branch on the last gradient", _by_gradient)
