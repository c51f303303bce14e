"""What a capture fixes: the values that the forward read in Python, the module's structure, and torch's settings.

Eager PyTorch reads them in each step. A compiled step holds their values, and refuses to run where one has changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from reprlib import repr as short

from torch import nn

from workbench.errors import WorkbenchError
from workbench.torch_api.tracing.watched import GONE, Structure, Watched, settings_of, watched

_WOULD_NOT = "which the compiled step would not read: capture again"
_ENVIRONMENT = re.compile(r".*environ\._data\[b'(\w+)'\]$")


class Fixed:
    """The state of a module, and of what its forward read elsewhere, as it is at the capture.

    read: the sources of what the forward read in Python. Watched are numbers, names, functions, and lists,
    dictionaries and sets of them, of modules, of their plain objects, of Python modules, closures and defaults.
    """

    def __init__(self, module: nn.Module, read: Iterable[str]):
        self.read = tuple(read)
        self._values, self._structure = watched(module, self.read), Structure(module)
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._device = next((p.device.type for p in module.parameters()), "cpu")
        self._settings = settings_of(self._device)

    def __len__(self) -> int:
        return len(self._values)

    def require_unchanged(self, title: str) -> None:
        """Raise WorkbenchError for the first that is another now, or a parameter that is not frozen any more."""
        path, changed = self._structure.change()
        if changed:
            of = f"module {path}: its" if path else "it:" if changed.startswith("hooks on") else "its module's"
            raise WorkbenchError(f"the compiled step of {title}: {of} {changed} changed since the capture, "
                                 "which the compiled step would not follow: capture again")
        for value in self._values:
            if value.changed():
                raise WorkbenchError(f"the compiled step of {title}: {_told(value)}")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise WorkbenchError(
                    f"the compiled step of {title}: parameter {name} was frozen at the capture and requires a gradient "
                    "now, which the compiled step would not compute: capture again")
        if (settings := settings_of(self._device)) != self._settings:
            name = next(name for name, value in settings.items() if value != self._settings[name])
            raise WorkbenchError(
                f"the compiled step of {title}: torch's setting {name!r} was {self._settings[name]} at the capture and "
                f"is {settings[name]} now, which the compiled step would not follow: capture again")


def _told(value: Watched) -> str:
    was, now = ("absent" if v is GONE else short(v) for v in (value.kept, value.now()))
    change = f"was {was} at the capture and is {'gone' if now == 'absent' else now} now, {_WOULD_NOT}"
    if value.of_model:
        where = f"module {value.owner}: its" if value.owner else "its module's"
        return f"{where} attribute {value.name!r} {change}, or make it a buffer and write into it in place"
    if found := _ENVIRONMENT.match(value.name):
        return f"environment variable {found[1]!r} {change}"
    return f"{value.name!r} of Python module {value.owner} {change}, or give it as an input"
