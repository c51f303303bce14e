"""The memory of the code that Inductor generates, read from that code statement by statement."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from workbench.errors import WorkbenchError
from workbench.lab.inside_inductor.function import Inside
from workbench.recipe.wording import counted

_BUFFER = re.compile(r"buf\d+")
_QUIET = ("assert_size_stride", "assert_alignment", "args.clear", "print", "run_intermediate_hooks",
          "torch.cuda.set_device")
_VIEWS = {"reinterpret_tensor": "reuses", "alloc_from_pool": "from a pool"}


@dataclass(frozen=True)
class Buffer:
    """A name in the code. bytes: None where known only at run time. memory: index of the allocation that holds it.

    how: `allocated`, `reuses` (the memory of a dead buffer), `from a pool` or `by eager` (an operator returned it).
    first, last: the calls between which it is alive.
    """

    name: str
    bytes: int | None
    memory: int
    how: str
    first: int
    last: int


@dataclass(frozen=True)
class Buffers:
    """calls: names in calling order. alive: bytes at each call, without inputs. memory: bytes of each allocation.

    unknown: buffers whose size is known only at run time. `alive`, `asked` and `peak` leave them out.
    """

    buffers: tuple[Buffer, ...]
    calls: tuple[str, ...]
    alive: tuple[int, ...]
    memory: tuple[int | None, ...]
    unknown: tuple[str, ...] = ()

    @property
    def allocations(self) -> int:
        """Number of allocations."""
        return len(self.memory)

    @property
    def asked(self) -> int:
        """Bytes of all allocations."""
        return sum(size or 0 for size in self.memory)

    @property
    def peak(self) -> int:
        """Most bytes alive at a call."""
        return max(self.alive, default=0)

    def __repr__(self) -> str:
        return f"Buffers({self.summary()})"

    def summary(self) -> str:
        """One line: buffers, allocations, bytes."""
        pieces = counted(self.allocations, "allocation")
        if self.buffers and len(self.unknown) == len(self.buffers):
            return f"{len(self.buffers)} buffers, {pieces}, of sizes known at run time"
        left = f", without the {len(self.unknown)} whose size is known at run time" if self.unknown else ""
        return (f"{len(self.buffers)} buffers, {pieces}, {self.asked:,} bytes in all, "
                f"peak {self.peak:,}{left}")


@dataclass
class _Walk:
    """memory: bytes of each allocation. lives_in: by name, the allocation that holds it now."""

    sizes: Mapping[str, int | None]
    memory: list[int | None] = field(default_factory=list)
    lives_in: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def take(self, name: str, memory: int, how: str) -> None:
        self.lives_in[name] = memory
        if _BUFFER.fullmatch(name):
            now = len(self.calls)
            self.buffers[name] = Buffer(name, self.sizes.get(name), memory, how, now, now)

    def new(self, name: str, size: int | None, how: str) -> None:
        self.memory.append(size)
        self.take(name, len(self.memory) - 1, how)

    def call(self, name: str) -> None:
        self.alive.append(sum(self.memory[m] or 0 for m in set(self.lives_in.values())))
        for buffer in self.lives_in.keys() & self.buffers.keys():
            self.buffers[buffer] = replace(self.buffers[buffer], last=len(self.calls))
        self.calls.append(name)

    def rename(self, name: str, old: str) -> None:
        memory, giver = self.lives_in[old], self.buffers.get(old)
        if giver is None or giver.bytes != 0:
            self.take(name, memory, "reuses")
            return
        # an operator's result had no size under its first name, and keeps that name
        size = self.memory[memory] = self.sizes.get(name)
        for call in range(giver.first, len(self.calls)):
            self.alive[call] += size or 0
        self.buffers[old] = replace(giver, bytes=size)
        self.lives_in[name] = memory

    def assign(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Name) and value.id in self.lives_in:
            self.rename(name, value.id)
        elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and _BUFFER.fullmatch(name):
            self.new(name, self.sizes.get(name), "by eager")
        elif isinstance(value, ast.Call):
            self.result(name, value, ast.unparse(value.func))

    def result(self, name: str, value: ast.Call, called: str) -> None:
        first = ast.unparse(value.args[0]) if value.args else ""
        if called.startswith("empty_strided"):
            self.new(name, _asked(value), "allocated")
        elif called in _VIEWS and first in self.lives_in:
            self.take(name, self.lives_in[first], _VIEWS[called])
        elif _BUFFER.fullmatch(name):  # the operator allocates its result, which is alive while it runs
            self.new(name, self.sizes.get(name), "by eager")
            self.call(called)


def _asked(call: ast.Call) -> int | None:
    """Bytes of an `empty_strided_cpu(shape, stride, dtype)`; None where the shape has a symbol."""
    try:
        shape = ast.literal_eval(call.args[0])
    except ValueError:
        return None
    dtype: torch.dtype = getattr(torch, ast.unparse(call.args[2]).removeprefix("torch."))
    return math.prod(shape) * dtype.itemsize


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for line in body:
        if isinstance(line, ast.With):
            yield from _statements(line.body)
        else:
            yield line


def call_statements(code: str) -> Iterator[ast.stmt]:
    """The statements of the function `call` of Inductor's Python code. Raises WorkbenchError for code without it."""
    calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if not calls:
        raise WorkbenchError("this code is not from Inductor: it has no function `call`")
    return _statements(calls[-1].body)


def buffers_of(inside: Inside) -> Buffers:
    """The memory that the code of `look_inside` allocates."""
    return read_buffers(inside.code, inside.sizes)


def read_buffers(code: str, sizes: Mapping[str, int | None]) -> Buffers:
    """Follow the function `call` of Inductor's Python code. sizes: bytes of each buffer, None if unknown.

    Raises WorkbenchError for code without that function.
    """
    walk = _Walk(sizes)
    for line in call_statements(code):
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            walk.assign(line.targets[0].id, line.value)
        elif isinstance(line, ast.Delete):
            for target in line.targets:
                walk.lives_in.pop(ast.unparse(target), None)
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
            name = ast.unparse(line.value.func)
            if not name.startswith(_QUIET):
                walk.call(name.removesuffix(".run"))
    unknown = tuple(name for name, buffer in walk.buffers.items() if buffer.bytes is None)
    return Buffers(tuple(walk.buffers.values()), tuple(walk.calls), tuple(walk.alive), tuple(walk.memory), unknown)
