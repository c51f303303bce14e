"""Fingerprints of code and data as loaded in this process: the keys of a cache of results."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from workbench.torch_api.ops import OPERATORS

_unlike = itertools.count()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Code of notebooks and inner functions by value; modules, operators and what is in files by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (ModuleType, *OPERATORS)):
            return str, (f"{type(value).__name__} {value}",)
        if isinstance(value, type) and (
            value.__module__ == "__main__" or "<locals>" in value.__qualname__
        ):
            # cloudpickle gives a class that is defined again another number
            members = {name: item for name, item in vars(value).items()
                   if isinstance(item, FunctionType) or not name.startswith("__")}
            return str, (value.__qualname__,), (value.__bases__, members)
        return super().reducer_override(value)


def fingerprint(*things: Any) -> str:
    """SHA-256, in hex, of functions, classes and data; equal where they are pickled alike.

    Of a notebook's function: its bytecode, line, defaults and closure, and what it names. What is defined in a file
    counts by name: `Sources` notices when the file changes. What cannot be pickled is unlike everything.
    """
    written = io.BytesIO()
    try:
        _Pickler(written).dump(things)
    except Exception:
        written.write(str(next(_unlike)).encode())
    return hashlib.sha256(written.getvalue()).hexdigest()


class Sources:
    """The files of the loaded modules outside site-packages and dist-packages."""

    def __init__(self) -> None:
        self.edits = 0
        self._times: dict[str, int] = {}

    def look(self) -> int:
        """How often a file was edited since it was first seen here."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            library = name.partition(".")[0] in sys.stdlib_module_names or "-packages/" in file
            if file.endswith(".py") and not library and os.path.isfile(file):
                time = os.stat(file).st_mtime_ns
                self.edits += self._times.setdefault(name, time) != time
                self._times[name] = time
        return self.edits
