"""The base of views that ask the kernel: a page gets the drawing module once, and `on_NAME` answers the call NAME."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import traitlets
from pydantic import ConfigDict, ValidationError, validate_call

from workbench.errors import WorkbenchError
from workbench.notebook.views.controls import STATIC, Controlled
from workbench.torch_api.garbage import uncollected


@functools.cache
def module() -> tuple[str, bytes]:
    """(a hash of it, the ES module): built from js/ by `npm run build`."""
    source = (STATIC / "views.js").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16], source


@functools.cache
def _checked(answer: Callable[..., Any]) -> Callable[..., Any]:
    return validate_call(config=ConfigDict(strict=True))(answer)


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

    def _answer(self, _: Any, message: Any, __: Any) -> None:
        message = message if isinstance(message, dict) else {}
        call, given = str(message.get("call")), message.get("args")
        given = given if isinstance(given, dict) else {}
        if call == "module":
            version, source = module()
            self.sent += len(source)
            self.send({"module": version}, [source])
            return
        try:
            # a garbage collection over the kernel's graphs would take longer than the answer
            with uncollected():
                found: dict[str, Any] = {"value": self.ask(call, **given)}
        except WorkbenchError as error:
            found = {"error": str(error)}
        found["id"] = message.get("id")
        self.sent += len(json.dumps(found))
        self.send(found)

    def ask(self, call: str, **given: Any) -> Any:
        """The answer to the page's `call`; WorkbenchError for a call or an argument that this view does not know."""
        # widgets have `on_...`, too
        kinds = (vars(kind) for kind in type(self).__mro__ if issubclass(kind, View))
        answer = next((kind[f"on_{call}"] for kind in kinds if f"on_{call}" in kind), None)
        if answer is None:
            raise WorkbenchError(f"a view of kind {self.kind!r} does not know {call!r}")
        try:
            return _checked(answer)(self, **given)
        except ValidationError as error:
            wrong = ", ".join(dict.fromkeys(str(each["loc"][0]) for each in error.errors()))
            raise WorkbenchError(
                f"{call}: these arguments are missing, unknown or of another type: {wrong}"
            ) from None
        except LookupError as error:
            raise WorkbenchError(f"{call}: this view has no {error.args[0]!r}") from None
