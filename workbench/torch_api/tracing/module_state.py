"""A module while its step is traced: its parts on other tensors, and what it reads, changes and calls in Python."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from operator import is_not
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

from workbench.torch_api.tracing.own_code import LEAF, global_sources, inside, is_own, refused_calls

_CONTAINERS = (list, dict, set, deque)
_TABLES = ("_parameters", "_buffers", "_modules")


class Untraceable(Exception):
    """The forward does what a traced step would leave out."""


@contextlib.contextmanager
def refused_calls_of_forwards() -> Iterator[None]:
    """Raise Untraceable where the forward calls torch.utils.checkpoint, seeds a generator or formats a tensor."""

    def formatted(*_: Any) -> Any:
        raise Untraceable("it formats a tensor in its forward, whose values a traced step does not have: print between "
                          "the steps")

    def leaf(name: str) -> property:
        def get(self: Any) -> Any:
            if "_is_param" in vars(self) and is_own(sys._getframe(1).f_code.co_filename):
                raise Untraceable(f"it reads a weight's {name!r} in its forward, where the weight may be gathered: "
                                  "read it between the steps")
            return getattr(super(FunctionalTensor, self), name)

        return property(get)

    def refuse(*_: Any) -> Any:
        raise Untraceable("it calls torch.utils.checkpoint, and a traced step would draw and write what it holds a "
                          "second time: list activation_checkpointing in joint_passes in its place")

    asked: Any = {"__repr__": formatted, **{name: leaf(name) for name in LEAF}}
    with (mock.patch.object(torch.utils.checkpoint, "_checkpoint_hook", refuse), refused_calls(Untraceable),
          mock.patch.multiple(FunctionalTensor, create=True, **asked)):
        yield


@contextlib.contextmanager
def swapped(module: nn.Module, names: Sequence[tuple[str, Any]], values: Sequence[Any]) -> Iterator[None]:
    """The module on other parameters and buffers. Raises Untraceable where something else is held at the end."""
    tensors = {id(old): new for (_, old), new in zip(names, values, strict=True)}
    parts = [(path, part) for path, part in module.named_modules()]
    held = [(part, dict(part._parameters), dict(part._buffers), dict(vars(part))) for _, part in parts]
    contents = [{n: list(v) for n, v in vars(part).items() if isinstance(v, _CONTAINERS) and n[:1] != "_"}
                for _, part in parts]
    placed = []
    for _, part in parts:
        for table in (part._parameters, part._buffers):
            table.update({name: tensors[id(old)] for name, old in table.items() if old is not None})
        placed.append({**part._parameters, **part._buffers})
    try:
        yield
        for (path, part), now, (_, _, _, attributes), inner in zip(parts, placed, held, contents, strict=True):
            where, after = f"module {path}" if path else "it", {**part._parameters, **part._buffers}
            changed = [n for n in {**now, **after} if now.get(n) is not after.get(n)]
            changed += [n for n, value in vars(part).items() if attributes.get(n, part) is not value]
            changed += [n for n, items in inner.items()
                        if len(items) != len(vars(part)[n]) or any(map(is_not, items, vars(part)[n]))]
            if changed:
                raise Untraceable(f"{where} changes its attribute {changed[0]!r} in its forward, which the traced step "
                                  "would not do: make it a buffer, and write into it in place, with copy_, add_ or "
                                  "lerp_")
    finally:
        for part, theirs, buffers, attributes in held:
            for name in [n for n in vars(part) if n not in attributes]:
                del vars(part)[name]
            vars(part).update(attributes)
            part._parameters.update(theirs)
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


@contextlib.contextmanager
def noted_python_reads(module: nn.Module) -> Iterator[tuple[set[str], list[tuple[str, torch.Tensor, set[str]]]]]:
    """What is read from the module's parts: sources of the attributes, also of what their plain objects hold; and each
    weight that FSDP gathers there, by its parameter's name, with the names of the attributes that it came with.
    """
    paths = {id(part): path for path, part in module.named_modules()}
    read = {*global_sources(module)}
    gathered: list[tuple[str, torch.Tensor, set[str]]] = []

    def place(part: nn.Module) -> str:
        return "L['self']" + "".join(f"._modules['{name}']" for name in paths[id(part)].split(".") if name)

    def noted(self: nn.Module, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        try:
            value = object.__getattribute__(self, name)
        except AttributeError:
            if id(self) in paths and not any(name in own.get(table, ()) for table in _TABLES):
                read.add(f"{place(self)}.{name}")
            raise
        held = name in own or not isinstance(value, MethodType)
        if id(self) in paths and held and not name.startswith("_") and not isinstance(value, nn.Module):
            source = f"{place(self)}.{name}"
            read.add(source)
            if name in own["_parameters"]:  # a property of SimpleFSDP: plain parameters are no attributes of the object
                value._is_param = True  # for isinstance
                gathered.append((f"{paths[id(self)]}.{name}".lstrip("."), value, {*vars(value)}))
            if not isinstance(value, torch.Tensor):
                read.update(inside(source, value))
        return value

    with mock.patch.object(nn.Module, "__getattribute__", noted):
        yield read, gathered


Generators = list[tuple[str, torch.Generator, torch.Tensor]]


def generators(module: nn.Module) -> Generators:
    """The random generators that the module's parts hold, by the attribute, with their states."""
    return [(f"{path}.{name}".lstrip("."), held, held.get_state()) for path, part in module.named_modules()
            for name, held in vars(part).items() if isinstance(held, torch.Generator)]


def require_unseeded(held: Generators) -> None:
    """Raise Untraceable where a trace, which draws nothing, has left a generator in another state; puts it back."""
    for name, generator, state in held:
        if not torch.equal(generator.get_state(), state):
            generator.set_state(state)
            raise Untraceable(f"it seeds its generator {name!r} in its forward, which a traced step would not do: seed "
                              "it between the steps")
