"""Widgets of ours and their controls: each control is an ipywidgets widget, linked to one trait."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from ipywidgets import FloatRangeSlider, HBox, Layout, VBox, Widget, widget_serialization

STATIC = Path(__file__).parent / "static"
CONTROL = {"width": "auto", "max_width": "340px"}
"""The layout of a control: as wide as it needs to be."""


class Controlled(anywidget.AnyWidget):
    """A view with controls. `panel` holds both, and is what a notebook shows of the view.

    linked: [control, its trait, our trait, values]. The kernel keeps linked traits equal; a page without a kernel reads
    this list and does it itself. values: of a selection, whose model knows the place of its value only; else None.
    presses: [button, values by trait], which it sets.
    twins: how many static outputs right above show the same, which `show` knows; the page hides them while the view is
    drawn.
    """

    linked: Any = traitlets.List().tag(sync=True, **widget_serialization)
    presses: Any = traitlets.List().tag(sync=True, **widget_serialization)
    kind = traitlets.Unicode().tag(sync=True)
    twins = traitlets.Int().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)

    def __init__(self, **traits: Any):
        super().__init__(**traits)
        self._panel = VBox([self], layout=Layout(width="100%"))

    def add(self, *controls: Widget) -> None:
        """Put controls on top, in a row of their own."""
        self._panel.children = [
            HBox(controls, layout=Layout(flex_flow="row wrap")),
            *self._panel.children,
        ]

    def link(self, trait: str, control: Widget, name: str = "value") -> Widget:
        """Keep a control's `name` equal to a trait of the view, both ways, and return the control."""
        traitlets.link((self, trait), (control, name))
        options = getattr(control, "options", None)
        values = options and [item[1] if isinstance(item, tuple) else item for item in options]
        self.linked = [*self.linked, [control, "index" if values else name, trait, values]]
        slides = hasattr(control, "readout")
        control.layout = Layout(**CONTROL, min_width="300px" if slides else None)
        return control

    @property
    def panel(self) -> VBox:
        """The controls above the view."""
        return self._panel

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # a page without scripts shows no stub
        return {
            **self._panel._repr_mimebundle_(**kwargs),
            "text/plain": "",
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.title})"


class OwnData(Controlled):
    """A view whose state holds the drawing module and all data, so that a saved page needs no kernel."""

    _esm = (STATIC / "moments.js").read_text(encoding="utf-8")
    data = traitlets.Unicode().tag(sync=True)

    def __init__(self, kind: str, title: str, data: Any, **traits: Any):
        super().__init__(kind=kind, title=title, data=packed(data), **traits)


class Zoomed(OwnData):
    """A plot from 0 to an end, to zoom into. `window`: from where to where is shown."""

    window = traitlets.Tuple(
        traitlets.Float(), traitlets.Float(), default_value=(0.0, 0.0)
    ).tag(sync=True)

    def zoom(self, end: float, **slider: Any) -> None:
        """Show all, with a slider for the window."""
        self.window = (0.0, end)
        self.add(self.link("window", FloatRangeSlider(max=end, step=end / 1000, **slider)))


def packed(data: Any) -> str:
    """JSON, compressed, as text: the page unpacks it with DecompressionStream."""
    return base64.b64encode(
        zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)
    ).decode()
