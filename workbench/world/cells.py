"""In a rank: the cells of a notebook, all in one namespace that lasts as long as the rank."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from workbench.world.pickling import Pickler, dumps

MAIN = ModuleType("__main__", "The namespace of the cells; `__main__`, so that their classes are sent by value.")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the text of an object without one of its own: not the same on any two ranks."""
_STREAMS: dict[int, Iterator[Any]] = {}


@dataclass(frozen=True)
class Shard:
    """A DTensor as one rank holds it, where it is sent to another process: `local` is this rank's part of `shape`."""

    local: Any
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    axes: tuple[str, ...]

    def __repr__(self) -> str:
        where = ", ".join(f"{axis}: {placed}" for axis, placed in zip(self.axes, self.placements, strict=True))
        return f"Shard of {list(self.shape)} ({where}):\n{self.local!r}"


@dataclass(frozen=True)
class Shown:
    """What a value that cannot be sent looks like in its rank."""

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
        return Shard, (value.to_local(), tuple(value.shape), tuple(map(str, value.placements)), tuple(axes))


def run_cell(source: str, name: str, given: dict[str, Any]) -> bytes | None:
    """Run a cell under its file name. The pickle of its last expression's value, or of how that looks; or None.

    `given` is put into the namespace first. Raises what the cell raises.
    """
    sys.modules["__main__"] = MAIN
    vars(MAIN).update(given)
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
    """The pickle of {name: value} of what the namespace has of `names`."""
    return dumps({name: vars(MAIN)[name] for name in names if name in vars(MAIN)}, _CellPickler)


def compiled(source: str, name: str) -> tuple[Any, Any]:
    """The cell's statements, and its last expression if it ends in one without a semicolon. SyntaxError as Python's.

    Line 1 is the cell's `%%ranks`. Tracebacks find the lines under `name`.
    """
    text = "\n" + source
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    tree = ast.parse(text, name)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = compile(ast.Expression(tree.body.pop().value), name, "eval", dont_inherit=True)  # type: ignore[attr-defined]
    return compile(tree, name, "exec", dont_inherit=True), last  # this module's `annotations` are not the cell's


def complete(text: str) -> list[str]:
    """What a name, or an attribute of one, in the cells' namespace may be completed to."""
    from rlcompleter import Completer

    completer = Completer(vars(MAIN))
    return completer.attr_matches(text) if "." in text else completer.global_matches(text)  # type: ignore[attr-defined]


def open_stream(key: int, fn: Callable[..., Iterator[Any]], args: Any, kwargs: Any) -> None:
    """Call `fn`, and keep the iterator that it returns under `key`."""
    _STREAMS[key] = iter(fn(*args, **kwargs))


def next_of(key: int) -> tuple[bool, Any]:
    """(True, the stream's next value), or (False, None) at its end."""
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
    """Let go of all that the cells and streams hold."""
    _STREAMS.clear()
    vars(MAIN).clear()
