"""In a rank: run a notebook's cells in one namespace that lives as long as the rank, and iterate streams."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from workbench.world.pickling import Pickler, dumps

MAIN = ModuleType(
    "__main__", "The cells' namespace, named so that cloudpickle sends their classes by value."
)
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address in a default `repr`, which differs between ranks."""
SHOWN = 500
"""The number of cells whose lines tracebacks show. Without a limit, each cell would leave 1 kB in every process."""
_SHOWN: deque[str] = deque()
_STREAMS: dict[int, Iterator[Any]] = {}


@dataclass(frozen=True)
class Shard:
    """A DTensor sent to another process: `local` is this rank's part of a tensor of `shape`."""

    local: Any
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]

    def __repr__(self) -> str:
        where = ", ".join(
            f"{axis}: {placed}" for axis, placed in zip(self.axes, self.placements, strict=True)
        )
        return f"Shard of {list(self.shape)} ({where}):\n{self.local!r}"


@dataclass(frozen=True)
class Shown:
    """The `repr` of a value that cannot be pickled."""

    text: str

    def __repr__(self) -> str:
        return self.text


class _CellPickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        mesh = sys.modules.get("torch.distributed.device_mesh")
        if mesh is not None and isinstance(obj, mesh.DeviceMesh):
            return Shown, (repr(obj),)
        return super().reducer_override(obj)

    def reduce_dtensor(self, value: Any) -> Any:
        mesh = value.device_mesh
        axes = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
        return Shard, (
            value.to_local(),
            tuple(value.shape),
            tuple(map(str, value.placements)),
            tuple(axes),
        )


def run_cell(source: str, name: str, variables: dict[str, Any]) -> bytes | None:
    """Put `variables` into the namespace and run a cell there. Raises what the cell raises.

    Returns the pickle of the last expression's value, or of its `repr` if it cannot be pickled; None for no value.
    """
    sys.modules["__main__"] = MAIN
    vars(MAIN).update(variables)
    body, last = compiled(source, name)
    exec(body, vars(MAIN))
    value = eval(last, vars(MAIN)) if last is not None else None
    if value is None:
        return None
    try:
        return dumps(value, _CellPickler)
    except Exception:
        return dumps(Shown(ADDRESS.sub("", repr(value))))


def fetch(names: list[str]) -> bytes:
    """The pickle of {name: value}, for those of `names` that the namespace has."""
    return dumps({name: vars(MAIN)[name] for name in names if name in vars(MAIN)}, _CellPickler)


def compiled(source: str, name: str) -> tuple[Any, Any]:
    """The code of a cell's statements, and of its last expression: None if it ends in none, or in a semicolon.

    Line 1 is the cell's `%%ranks`. Tracebacks show the lines of the last cells under `name`. Raises SyntaxError.
    """
    text = "\n" + source
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    _SHOWN.append(name)
    if len(_SHOWN) > SHOWN:
        linecache.cache.pop(_SHOWN.popleft(), None)
    tree = ast.parse(text, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = compile(ast.Expression(tree.body.pop().value), name, "eval", dont_inherit=True)  # type: ignore[attr-defined]
    # this module's `annotations` are not the cell's
    return compile(tree, name, "exec", dont_inherit=True), last


def complete(text: str) -> list[str]:
    """Completions of a name or attribute in the cells' namespace."""
    from rlcompleter import Completer

    completer = Completer(vars(MAIN))
    return completer.attr_matches(text) if "." in text else completer.global_matches(text)  # type: ignore[attr-defined]


def open_stream(key: int, fn: Callable[..., Iterator[Any]], args: Any, kwargs: Any) -> None:
    """Call `fn` and store the iterator that it returns under `key`."""
    _STREAMS[key] = iter(fn(*args, **kwargs))


def next_of(key: int) -> tuple[bool, Any]:
    """(True, the stream's next value), or (False, None) if it has ended."""
    try:
        return True, next(_STREAMS[key])
    except StopIteration:
        return False, None


def close_stream(key: int) -> None:
    """End a stream early; its `finally` blocks run."""
    stream = _STREAMS.pop(key, None)
    if isinstance(stream, Generator):
        stream.close()


def forget() -> None:
    """Drop all objects of cells and streams."""
    _STREAMS.clear()
    vars(MAIN).clear()
