"""Values outside of the graph that a traced forward reads. Dynamo guards them, and a capture for export has no guards.

Source: torch/_dynamo/variables/dicts.py (`SideEffectsProxyDict`), torch/_dynamo/variables/user_defined.py
(`UserDefinedObjectVariable.generic_getattr`, `call_random_fn`), torch/_subclasses/fake_tensor.py
(`FakeTensorConverter.from_real_tensor`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import torch._dynamo.config
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import misc, user_defined
from torch._dynamo.variables.dicts import SideEffectsProxyDict
from torch._subclasses.fake_tensor import FakeTensorConverter


@contextlib.contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Inside, collects the sources of the attributes that a traced forward looks for before it assigns them.

    Dynamo guards the attributes that are there, and not all that are absent: `"seen" in vars(self)` and the
    AttributeError of `self.seen` leave no guard. `source.*` stands for all attributes of an object.
    """
    read: set[str] = set()

    def note(variable: Any, effects: Any, name: str) -> None:
        if variable.source is not None and not effects.has_pending_mutation_of_attr(variable, name):
            read.add(f"{variable.source.name}.{name}")

    contains, item, names = (getattr(SideEffectsProxyDict, each) for each in ("__contains__", "__getitem__", "__iter__"))
    get = user_defined.UserDefinedObjectVariable.generic_getattr

    def noted_contains(self: Any, key: Any) -> Any:
        note(self.item, self.side_effects, self._maybe_unwrap_key(key))
        return contains(self, key)

    def noted_item(self: Any, key: Any) -> Any:
        note(self.item, self.side_effects, self._maybe_unwrap_key(key))
        return item(self, key)

    def noted_names(self: Any) -> Any:
        note(self.item, self.side_effects, "*")
        return names(self)

    def noted_get(self: Any, tx: Any, name: str) -> Any:
        note(self, tx.output.side_effects, name)
        return get(self, tx, name)

    with (mock.patch.multiple(SideEffectsProxyDict, __contains__=noted_contains, __getitem__=noted_item,
                              __iter__=noted_names),
          mock.patch.object(user_defined.UserDefinedObjectVariable, "generic_getattr", noted_get)):
        yield read


@contextlib.contextmanager
def nothing_frozen() -> Iterator[None]:
    """Inside, a traced forward finds no value that would stay what it is at the capture.

    Dynamo knows the `item()` of a scalar integer or float64 tensor in host memory, such as a buffer that counts the
    steps: here it does not, and a branch on one depends on a tensor's value. A number that Python or NumPy draws is
    refused.
    """
    make = FakeTensorConverter.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options | {"export": True})

    with (mock.patch.object(FakeTensorConverter, "__init__", made),
          mock.patch.object(user_defined, "call_random_fn", _refuse), mock.patch.object(misc, "call_random_fn", _refuse),
          torch._dynamo.config.patch(use_numpy_random_stream=True)):
        yield


def _refuse(tx: Any, drawn: Any, *given: Any) -> NoReturn:
    unimplemented(gb_type="random.", context=str(drawn), explanation="It draws random numbers in Python.", hints=[])
