"""The loads and stores of the kernels that Inductor generates for a CPU, read from their C++ loops."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from workbench.errors import WorkbenchError
from workbench.lab.inside_inductor.function import Inside
from workbench_lessons.l12_inside_inductor.buffers import call_statements

_KERNEL = re.compile(r"(\w+) = async_compile\.cpp_pybinding\(.*?r'''(.*?)'''\)", re.DOTALL)
_POINTER = re.compile(r"([\w:]+)\* (\w*ptr\d+)")
_ALIAS = re.compile(r"auto (\w+ptr\d+) = (\w+ptr\d+);")
_LOOP = re.compile(r"for\(int64_t \w+=static_cast<int64_t>\((\d+)L\); \w+<static_cast<int64_t>\((\d+)L\); "
                   r"\w+\+=static_cast<int64_t>\((\d+)L\)\)")
_ACCESS = re.compile(r"(\w+ptr\d+)\[")
_STORE = re.compile(r"\s*(\w+ptr\d+)\[.*?\] = ")
_WIDTHS = {"float": 4, "double": 8, "bfloat16": 2, "half": 2, "int64_t": 8, "int32_t": 4, "bool": 1, "uint8_t": 1,
           "int8_t": 1, "int16_t": 2}


def _sources(code: str) -> dict[str, str]:
    return dict(_KERNEL.findall(code))


def loop_body(inside: Inside) -> list[tuple[str, str]]:
    """The lines of the first generated loop over elements, each with "load", "store" or "".

    Types are left out, and casts that change none. Raises WorkbenchError where Inductor generated no C++ kernel.
    """
    sources = _sources(inside.code)
    if not sources:
        raise WorkbenchError("this code has no C++ kernel: give a function of CPU tensors that Inductor fuses")
    lines = [line.strip().rstrip(";") for line in next(iter(sources.values())).splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("auto tmp"))
    last = next(i for i in range(first, len(lines)) if lines[i] == "}")
    return [(_plain(line), "store" if _STORE.match(line) else "load" if _ACCESS.search(line) else "")
            for line in lines[first:last]]


def _plain(line: str) -> str:
    line = re.sub(r"static_cast<\w+>\(([\w.]+)\)", r"\1", line.removeprefix("auto "))
    line = re.sub(r"= (?:decltype\(\w+\)|float)\((.*)\)$", r"= \1", line)
    return re.sub(r"\b(?:c10|at|std)::", "", line)


def _accesses(source: str) -> Iterator[tuple[str, str, int]]:
    """Of each load and store in the source: which it is, its pointer, and how often the loops around it run it."""
    alias, around, times = dict(_ALIAS.findall(source)), [1], 1
    for line in source.splitlines():
        loop = _LOOP.search(line)
        if loop:
            start, stop, step = map(int, loop.groups())
            times = math.ceil((stop - start) / step)
        elif line.strip() == "{":
            around.append(around[-1] * times)
            times = 1
        elif line.strip() == "}":
            around.pop()
        else:
            store = _STORE.match(line)
            for i, pointer in enumerate(_ACCESS.findall(line)):
                yield "stores" if store and i == 0 else "loads", alias.get(pointer, pointer), around[-1]


def accesses_of(inside: Inside) -> dict[str, int]:
    """Loads and stores that stand in the generated kernels, each counted once however often a loop runs it."""
    return dict(Counter(kind for source in _sources(inside.code).values() for kind, *_ in _accesses(source)))


def bytes_moved(inside: Inside) -> int:
    """Bytes that all calls load and store. A library call, or one by eager, loads each operand and stores its result.

    A loop counts each time that it runs an access, also where a cache answers it. Raises WorkbenchError for Triton.
    """
    if "async_compile.triton(" in inside.code:
        raise WorkbenchError("this code has Triton kernels: bytes are counted in C++ loops, so give tensors on the CPU")
    kernels = {}
    for name, source in _sources(inside.code).items():
        widths = {pointer: _WIDTHS[kind.rpartition("::")[2].lower()] for kind, pointer in _POINTER.findall(source)}
        kernels[name] = sum(widths[pointer] * times for _, pointer, times in _accesses(source))
    return _Traffic(inside, kernels).total()


@dataclass
class _Traffic:
    """kernels: bytes that a call of each generated kernel moves. tensors: bytes, and bytes of an element, by name."""

    inside: Inside
    kernels: dict[str, int]
    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)

    def total(self) -> int:
        for i, node in enumerate(self.inside.graph.graph.find_nodes(op="placeholder")):
            value = node.meta["val"]
            self.tensors[f"arg{i}_1"] = value.nbytes, value.itemsize
        return sum(map(self.statement, call_statements(self.inside.code)))

    def statement(self, line: ast.stmt) -> int:
        name = ast.unparse(line.targets[0]) if isinstance(line, ast.Assign) else ""
        value = line.value if isinstance(line, ast.Assign | ast.Expr) else None
        if isinstance(value, ast.Name) and value.id in self.tensors:
            size, item = self.tensors[value.id]
            self.tensors[name] = size or self.inside.sizes.get(name) or 0, item
            return self.tensors[name][0] - size  # eager's result has no size under its first name
        if not isinstance(value, ast.Call):
            return 0
        called = ast.unparse(value.func)
        if called in self.kernels:
            return self.kernels[called]
        if called.startswith("empty_strided"):
            item = getattr(torch, ast.unparse(value.args[2]).removeprefix("torch.")).itemsize
            self.tensors[name] = self.inside.sizes.get(name) or 0, item
        elif called == "reinterpret_tensor":
            self.tensors[name] = self.operand(value)
        elif called.startswith(("extern_kernels.", "torch.ops.")):
            operands = [*value.args, *(word.value for word in value.keywords if word.arg == "out")]
            moved = [self.operand(operand) for operand in operands]
            if name:
                moved.append((self.inside.sizes.get(name) or 0, max((item for _, item in moved), default=0)))
                self.tensors[name] = moved[-1]
            return sum(size for size, _ in moved)
        return 0

    def operand(self, operand: ast.expr) -> tuple[int, int]:
        if isinstance(operand, ast.Call) and ast.unparse(operand.func) == "reinterpret_tensor":
            item = self.tensors[ast.unparse(operand.args[0])][1]
            return math.prod(ast.literal_eval(operand.args[1])) * item, item
        return self.tensors.get(ast.unparse(operand), (0, 0))
