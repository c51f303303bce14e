"""A module while its step is traced: its parts on other tensors, and the module that each node belongs to."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
from torch import nn


@contextlib.contextmanager
def swapped(
    module: nn.Module, names: Sequence[tuple[str, Any]], values: Sequence[Any]
) -> Iterator[None]:
    """The module on other parameters and buffers; afterwards its parts have the attributes that they had before."""
    tensors = {id(old): new for (_, old), new in zip(names, values, strict=True)}
    parts = list(module.modules())
    before = [
        (part, dict(part._parameters), dict(part._buffers), dict(vars(part))) for part in parts
    ]
    for part in parts:
        for table in (part._parameters, part._buffers):
            table.update({name: tensors[id(old)] for name, old in table.items() if old is not None})
    try:
        yield
    finally:
        for part, parameters, buffers, attributes in before:
            for name in [n for n in vars(part) if n not in attributes]:
                del vars(part)[name]
            vars(part).update(attributes)
            part._parameters.update(parameters)
            part._buffers.update(buffers)


@contextlib.contextmanager
def noted_modules(module: nn.Module) -> Iterator[None]:
    """Each node gets the stack of modules whose forward it was traced in."""
    names = {id(part): (path, type(part)) for path, part in reversed([*module.named_modules()])}
    call, stack = nn.Module._call_impl, [OrderedDict[str, Any]()]

    def called(part: nn.Module, *args: Any, **kwargs: Any) -> Any:  # hooks of the part included
        outer = stack[-1]
        path, kind = names.get(id(part), ("", type(part)))
        stack.append(OrderedDict({**outer, path: (path, kind)}))
        torch.fx.traceback.current_meta["nn_module_stack"] = stack[-1]
        try:
            return call(part, *args, **kwargs)
        finally:  # torch replaces the dict where it traces a higher-order operator
            stack.pop()
            torch.fx.traceback.current_meta.pop("nn_module_stack", None)
            if outer:
                torch.fx.traceback.current_meta["nn_module_stack"] = outer

    with mock.patch.object(nn.Module, "_call_impl", called):
        yield
