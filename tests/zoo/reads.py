"""Odd modules whose forward reads or changes what lies outside of its tensors: who is asked, drawn, set or replaced."""

import contextvars
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, written

# an attribute that the last forward assigned


def asked(how: str, ask: Callable[[Any], Any]) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        found = x * 2 if ask(m) else x
        m.later = x
        return found

    written(f"an attribute that is asked for {how}", function)


asked("in __dict__", lambda m: "later" in m.__dict__)
asked("by dir", lambda m: "later" in dir(m))


# the value of a counter


def counter(name: str, use: Callable[[Any, Tensor], Tensor], dtype: torch.dtype) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        found = use(m.steps.item(), x)
        m.steps.add_(1)
        return found

    written(f"{name} of {str(dtype).removeprefix('torch.')}", function,
            steps=lambda: torch.ones((), dtype=dtype))


counter("a branch on the item", lambda n, x: x if n < 2 else -x, torch.int64)
counter("a product with the item", lambda n, x: x * n, torch.int64)
counter("a product with the item", lambda n, x: x * n, torch.float64)
counter("a loop over the item", lambda n, x: sum([x for _ in range(n)], x), torch.int64)
written("a scale of float64", lambda m, x: (x * m.scale).float(), scale=lambda: torch.tensor(2.5, dtype=torch.float64))


# buffers that are replaced


def _swapped(m: Any, x: Tensor) -> Tensor:
    found = x * m.mean
    m.mean, m.other = m.other, m.mean
    return found


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    def function(x: Tensor) -> Tensor:
        return x.sin() * m.mean.add_(1)

    return checkpoint(function, x, use_reentrant=False)


ONES = {"mean": lambda: torch.ones(DIM)}
written("a buffer written in a checkpoint", _checkpointed, **ONES)
written("buffers that change places", _swapped, **ONES, other=lambda: torch.zeros(DIM))


# numbers that are drawn, and the machine's own

for name, draw in {"uniform": lambda: random.uniform(0, 1), "choice": lambda: random.choice([1, 2]),
                   "np.random.rand": np.random.rand,
                   "np.random.randn": lambda: torch.from_numpy(np.random.randn(DIM).astype(np.float32))}.items():
    written(f"a number of {name}", lambda m, x, draw=draw: x * draw())
written("the time", lambda m, x: x * (time.time() % 1))
written("an item of torch.rand", lambda m, x: x * torch.rand(()).item())


# what lies elsewhere


def _environment(m: Any, x: Tensor) -> Tensor:
    calls = int(os.environ.get("ZOO_CALLS", "0")) + 1
    os.environ["ZOO_CALLS"] = str(calls)
    return x * calls


class Counts:
    calls = 0


def _of_class(m: Any, x: Tensor) -> Tensor:
    Counts.calls += 1
    return x * Counts.calls


def _of_weight(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.calls = getattr(m.layer.weight, "calls", 0) + 1
    return x * m.layer.weight.calls


def _by_identity(m: Any, x: Tensor) -> Tensor:
    return x * IDS.setdefault(id(x), len(IDS) + 1)


def _of_context(m: Any, x: Tensor) -> Tensor:
    CONTEXT.set(CONTEXT.get() + 1)
    return x * CONTEXT.get()


def _turned(m: Any, x: Tensor) -> Tensor:
    m.training = not m.training
    return x if m.training else -x


CONTEXT = contextvars.ContextVar("CONTEXT", default=0)
IDS: dict[int, int] = {}
written("a number of a class", _of_class)
written("a number of a context", _of_context)
written("a number of a weight", _of_weight)
written("a number by identity", _by_identity)
written("a number of the environment", _environment)
written("training that is turned", _turned)
written("the version of a weight", lambda m, x: x * m.layer.weight._version)
written("the gradient mode", lambda m, x: x if torch.is_grad_enabled() else -x)
