"""The base of the views that hold their own data."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import traitlets

from workbench.errors import WorkbenchError
from workbench.notebook.draw.picture import Picture, Table
from workbench.notebook.views.controls import STATIC, Controlled


class Moment(Controlled):
    """A view whose state holds the drawing module and all data, so that a saved page needs no kernel.

    message: what is wrong with the state, in the words of the check that refuses it; the page shows it.
    figures: what the state costs, for a checkpoint; empty where there is a message.
    """

    _esm = (STATIC / "moments.js").read_text(encoding="utf-8")
    message = traitlets.Unicode().tag(sync=True)
    data = traitlets.Unicode().tag(sync=True)
    figures = traitlets.Dict()

    def __init__(self, kind: str, title: str, data: Any, **traits: Any):
        super().__init__(kind=kind, title=title, data=packed(data), **traits)

    def result(self) -> dict[str, float]:
        """The figures, to be graded. WorkbenchError with the message where there are none."""
        if self.message:
            raise WorkbenchError(self.message)
        return dict(self.figures)

    def picture(self) -> Picture | Table:
        """The static picture beside the view, for where no script runs."""
        raise NotImplementedError


def packed(data: Any) -> str:
    """JSON, compressed, as text: the page unpacks it with DecompressionStream."""
    return base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()
