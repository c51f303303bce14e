"""The base of all views: the drawing module is sent once to each page, and `on_NAME` answers the call NAME."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.errors import WorkbenchError
from workbench.torch_api.garbage import uncollected

_STATIC = Path(__file__).parent / "static"


@functools.cache
def module() -> tuple[str, bytes]:
    """(a hash of it, the ES module): built from js/ by `npm run build`."""
    source = (_STATIC / "views.js").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16], source


class View(anywidget.AnyWidget):
    """A view of one kind. `sent`: bytes that it has sent to the page, the module included.

    The widget's state holds its kind, its title and a hash: a saved notebook keeps nothing else.
    """

    _esm = (_STATIC / "loader.js").read_text(encoding="utf-8")
    kind = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    version = traitlets.Unicode().tag(sync=True)

    def __init__(self, kind: str, title: str):
        self.sent = 0
        super().__init__(kind=kind, title=title, version=module()[0])
        self.on_msg(self._answer)

    def _answer(self, _: Any, message: dict[str, Any], __: Any) -> None:
        call = str(message.get("call"))
        if call == "module":
            version, source = module()
            self.sent += len(source)
            self.send({"module": version}, [source])
            return
        try:
            with uncollected():  # a garbage collection over the kernel's graphs would take longer than the answer
                found: dict[str, Any] = {"value": self.ask(call, **message.get("args", {}))}
        except (WorkbenchError, KeyError, ValueError, IndexError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        found["id"] = message.get("id")
        self.sent += len(json.dumps(found))
        self.send(found)

    def ask(self, call: str, **given: Any) -> Any:
        """The answer to the page's `call`; WorkbenchError for a call that this view does not know."""
        answer = getattr(self, f"on_{call}", None)
        if answer is None or call == "msg":
            raise WorkbenchError(f"a view of kind {self.kind!r} does not know {call!r}")
        return answer(**given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title})"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        found = super()._repr_mimebundle_(**kwargs)
        data = found[0] if isinstance(found, tuple) else found
        if data:
            data["text/plain"] = repr(self)
        return found
