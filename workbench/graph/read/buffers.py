"""The memory of the code that Inductor generates, read from that code statement by statement."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from workbench.errors import WorkbenchError
from workbench.recipe.wording import counted

_BUFFER = re.compile(r"buf\d+")
_QUIET = ("assert_size_stride", "assert_alignment", "args.clear", "print", "run_intermediate_hooks",
          "torch.cuda.set_device")


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
            return f"{len(self.buffers)} buffers in {pieces}, of sizes known at run time"
        left = f", without the {len(self.unknown)} whose size is known at run time" if self.unknown else ""
        return (f"{len(self.buffers)} buffers in {pieces} of {self.asked:,} bytes, "
                f"peak {self.peak:,}{left}")


@dataclass
class _Walk:
    sizes: Mapping[str, int | None]
    memory: list[int | None] = field(default_factory=list)
    lives_in: dict[str, int] = field(default_factory=dict)
    found: dict[str, Buffer] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def take(self, name: str, memory: int, how: str) -> None:
        self.lives_in[name] = memory
        if _BUFFER.fullmatch(name):
            now = len(self.calls)
            self.found[name] = Buffer(name, self.sizes.get(name), memory, how, now, now)

    def new(self, name: str, size: int | None, how: str) -> None:
        self.memory.append(size)
        self.take(name, len(self.memory) - 1, how)

    def call(self, name: str) -> None:
        self.alive.append(sum(self.memory[m] or 0 for m in set(self.lives_in.values())))
        for mine in self.lives_in:
            if mine in self.found:
                self.found[mine] = replace(self.found[mine], last=len(self.calls))
        self.calls.append(name)

    def assign(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Name) and value.id in self.lives_in:
            held, giver = self.lives_in[value.id], self.found.get(value.id)
            if giver is None or giver.bytes != 0:
                return self.take(name, held, "reuses")
            # an operator's result had no size under its first name, and keeps that name
            size = self.memory[held] = self.sizes.get(name)
            for call in range(giver.first, len(self.calls)):
                self.alive[call] += size or 0
            self.found[giver.name] = replace(giver, bytes=size)
            self.lives_in[name] = held
            return None
        if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and _BUFFER.fullmatch(name):
            return self.new(name, self.sizes.get(name), "by eager")
        if not isinstance(value, ast.Call):
            return None
        called = ast.unparse(value.func)
        first = value.args[0] if value.args else None
        if called.startswith("empty_strided"):
            return self.new(name, _asked(value), "allocated")
        if isinstance(first, ast.Name) and first.id in self.lives_in:
            if called == "reinterpret_tensor":
                return self.take(name, self.lives_in[first.id], "reuses")
            if called == "alloc_from_pool":
                return self.take(name, self.lives_in[first.id], "from a pool")
        if _BUFFER.fullmatch(name):  # the operator allocates its result, which is alive while it runs
            self.new(name, self.sizes.get(name), "by eager")
            self.call(called)
        return None


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


def read_buffers(code: str, sizes: Mapping[str, int | None]) -> Buffers:
    """Follow the function `call` of Inductor's Python code. sizes: bytes of each buffer, None if unknown.

    Raises WorkbenchError for code without that function.
    """
    calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if not calls:
        raise WorkbenchError("this code is not from Inductor: it has no function `call`")
    walk = _Walk(sizes)
    for line in _statements(calls[-1].body):
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            walk.assign(line.targets[0].id, line.value)
        elif isinstance(line, ast.Delete):
            for target in line.targets:
                walk.lives_in.pop(ast.unparse(target), None)
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
            name = ast.unparse(line.value.func)
            if not name.startswith(_QUIET):
                walk.call(name.removesuffix(".run"))
    unknown = tuple(name for name, b in walk.found.items() if b.bytes is None)
    return Buffers(tuple(walk.found.values()), tuple(walk.calls), tuple(walk.alive), tuple(walk.memory), unknown)
