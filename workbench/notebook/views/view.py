"""The base of views that ask the kernel: a page gets the drawing module once, and `on_NAME` answers the call NAME."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any

import traitlets

from workbench.errors import WorkbenchError
from workbench.notebook.views.controls import STATIC, Controlled
from workbench.torch_api.garbage import uncollected


@functools.cache
def module() -> tuple[str, bytes]:
    """(a hash of it, the ES module): built from js/ by `npm run build`."""
    source = (STATIC / "views.js").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16], source


class View(Controlled):
    """A view of one kind. `sent`: bytes that it has sent to the page, the module included.

    The widget's state holds its kind, its title and a hash: a saved notebook keeps nothing else.
    """

    _esm = (STATIC / "loader.js").read_text(encoding="utf-8")
    version = traitlets.Unicode().tag(sync=True)

    def __init__(self, kind: str, title: str):
        self.sent = 0
        super().__init__(kind=kind, title=title, version=module()[0])
        self.on_msg(self._answer)

    def _answer(self, _: Any, message: dict[str, Any], __: Any) -> None:
        call = message["call"]
        if call == "module":
            version, source = module()
            self.sent += len(source)
            self.send({"module": version}, [source])
            return
        try:
            # a garbage collection over the kernel's graphs would take longer than the answer
            with uncollected():
                answer: dict[str, Any] = {"value": self.ask(call, **message.get("args", {}))}
        except WorkbenchError as error:
            answer = {"error": str(error)}
        answer["id"] = message.get("id")
        self.sent += len(json.dumps(answer))
        self.send(answer)

    def ask(self, call: str, **args: Any) -> Any:
        """The answer to the page's `call`; WorkbenchError for what this view does not have."""
        try:
            return getattr(self, f"on_{call}")(**args)
        except LookupError as error:
            raise WorkbenchError(f"{call}: this view has no {error.args[0]!r}") from None
