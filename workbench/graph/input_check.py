"""A compiled step's arguments against those of its capture, at each call: a graph is made for one kind of input.

With another it would compute something else, or fail far from the cause.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from workbench.errors import WorkbenchError

Path = tuple[Any, ...]


class TensorKind(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    is_conj: bool
    is_neg: bool


class ContainerKind(NamedTuple):
    type: type
    keys: range | list[Any]
    items: list[Any]


class ValueKind(NamedTuple):
    type: type
    value: Any


@dataclass(frozen=True)
class InputCheck:
    """What the arguments were at the capture.

    names: of the forward's arguments. kind: of all of them, see `kind_of`. shared: for each tensor the first argument
    that it is, or if the forward writes into an argument in place (writes), that it shares memory with. Then no others
    may share memory than did.
    """

    names: list[str]
    kind: ContainerKind
    shared: list[int]
    writes: bool = False

    @cached_property
    def one_for_two(self) -> bool:
        """Whether one tensor was two arguments: its graph reads only one of the two."""
        return self.shared != list(range(len(self.shared)))

    @classmethod
    def of(
        cls, batch: tuple[Any, ...], forward: Callable[..., Any], writes: bool = False
    ) -> InputCheck:
        return cls(_names(forward, len(batch)), kind_of(batch), _shared(batch, writes), writes)

    def require(self, step: str, batch: tuple[Any, ...]) -> None:
        """Raise WorkbenchError for the first argument that is of another kind. step: its title, for the message."""
        for argument, what, captured, now in self.differences(batch):
            raise _refusal(step, f"the {what} of {argument}", captured, now)
        if self.writes or self.one_for_two:
            self._require_shared(step, batch)

    def differences(self, batch: tuple[Any, ...]) -> Iterator[tuple[str, str, str, str]]:
        """(argument, what, at the capture, now) for all that is of another kind."""
        kind = kind_of(batch)
        if kind != self.kind:
            for path, what, captured, now in _differences(self.kind, kind):
                yield self._argument(path), what, captured, now

    def _require_shared(self, step: str, batch: tuple[Any, ...]) -> None:
        paths = [path for path, _ in _tensors(batch)]
        places = _shared(batch, self.writes)
        for place, (captured, now) in enumerate(zip(self.shared, places, strict=True)):
            if captured != now and (self.writes or captured != place):
                one, two = (f"the memory of {self._argument(paths[at])}" for at in (captured, now))
                raise _refusal(step, f"the memory of {self._argument(paths[place])}", one, two)

    def _argument(self, path: Path) -> str:
        if not path:
            return f"its arguments ({', '.join(self.names)})"
        number, *keys = path
        return self.names[number] + "".join(f"[{key!r}]" for key in keys)


def kind_of(value: Any) -> Any:
    """What must be equal: a container's keys in their order, a tensor's layout, anything else by its value."""
    if isinstance(value, torch.Tensor):
        # generated code, which reads the memory, would not see the last two
        return TensorKind(
            value.dtype, value.shape, value.stride(), value.device.type, value.requires_grad,
            value.is_conj(), value.is_neg()
        )
    if isinstance(value, dict):
        return ContainerKind(type(value), list(value), list(map(kind_of, value.values())))
    if isinstance(value, tuple | list):
        return ContainerKind(type(value), range(len(value)), list(map(kind_of, value)))
    if hasattr(value, "__array__"):  # numpy's == gives an array
        value = value.dtype, value.tolist()
    return ValueKind(type(value), value)


def _differences(captured: Any, now: Any, path: Path = ()) -> Iterator[tuple[Path, str, str, str]]:
    """(where, what, captured, now) for all that differs."""
    if type(captured) is not type(now):
        yield path, "type", _type(captured), _type(now)
        return
    for name, was, becomes in zip(captured._fields, captured, now, strict=True):
        if name == "items":
            for key, one, other in zip(captured.keys, was, becomes, strict=True):
                yield from _differences(one, other, (*path, key))
        elif was != becomes:
            what = "length" if isinstance(was, range) else name
            yield path, what, _shown(was), _shown(becomes)


def _type(kind: Any) -> str:
    return "Tensor" if isinstance(kind, TensorKind) else kind.type.__name__


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, range):
        return str(len(value))
    return str(list(value) if isinstance(value, tuple) else value).removeprefix("torch.")


def _refusal(step: str, what: str, captured: str, now: str) -> WorkbenchError:
    return WorkbenchError(
        f"the compiled step of {step}: {what}: {captured} at the capture, and {now} now: "
        "capture again with such inputs, or convert it"
    )


def _names(forward: Callable[..., Any], count: int) -> list[str]:
    """The forward's own names, and numbers for those that it takes as `*args`."""
    names = [f"input {number + 1}" for number in range(count)]
    for number, parameter in enumerate(inspect.signature(forward).parameters.values()):
        if number == count or parameter.kind is parameter.VAR_POSITIONAL:
            break
        names[number] = parameter.name
    return names


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | tuple | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(item, (*path, key))


def _shared(batch: tuple[Any, ...], writes: bool) -> list[int]:
    """Two views of one memory are two inputs of a graph, unless the forward writes into one."""
    places: dict[int, int] = {}
    return [
        places.setdefault(tensor.untyped_storage()._cdata if writes else id(tensor), place)
        for place, (_, tensor) in enumerate(_tensors(batch))
    ]
