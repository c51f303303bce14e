"""A second handle on a capture, which compiling the first one leaves usable."""

from __future__ import annotations

import copy
import enum
from typing import Any

from torch._functorch._aot_autograd import descriptors


def fork_joint(export: Any) -> Any:
    """A `JointWithDescriptors` on the same graph. Compiling it leaves `export` usable.

    Compiling writes into torch's records of the capture: subclasses of inputs, saved tensors, wrappers. These are
    copied. Graphs, tensors and descriptors are shared. `export` must not have been compiled.
    """
    return _forked(export, {})


_RECORDS = "torch._functorch._aot_autograd"


def _forked(value: Any, copies: dict[int, Any]) -> Any:
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (list, tuple):
        copied = copies[id(value)] = type(value)([_forked(v, copies) for v in value])
        return copied
    if type(value) is dict:
        copied = copies[id(value)] = {k: _forked(v, copies) for k, v in value.items()}
        return copied
    kind = type(value)
    ours = kind.__module__.startswith(_RECORDS) and kind.__module__ != descriptors.__name__
    if (
        not ours
        or isinstance(value, enum.Enum)
        or not hasattr(value, "__dict__")
        or callable(value)
    ):
        return value
    copied = copies[id(value)] = copy.copy(value)
    for name, attribute in vars(value).items():
        object.__setattr__(copied, name, _forked(attribute, copies))  # some are frozen
    return copied
