"""Picture and Table: a PNG or rows, with a text form that holds the same facts."""

from __future__ import annotations

import html
import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from workbench.notebook.draw.colors import INK, PAPER
from workbench.recipe.files import write_whole
from workbench.recipe.wording import aligned

DPI = 120


@dataclass(frozen=True)
class Picture:
    """A PNG. alt: one sentence that describes it; text: its facts, line by line.

    The text form holds counts, bytes and names only: no time, path or loss, so that committed outputs can be compared.
    """

    png: bytes = field(repr=False)
    alt: str
    text: str
    width: int
    height: int

    def save(self, path: Path | str) -> Path:
        """Write the PNG to `path`."""
        target = Path(path)
        write_whole(target, self.png)
        return target

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        size = {"alt": self.alt, "width": self.width, "height": self.height}
        data = {"image/png": b64encode(self.png).decode(), "text/plain": self.text}
        return data, {"image/png": size, "needs_background": "light"}


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of that many inches, without pyplot and its state."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, **layout: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row, without frames at the top and right; `layout` is what `subplots` takes."""
    figure = new_figure(width, height)
    panes = list(figure.subplots(rows, columns, squeeze=False, **layout).flat)
    for axes in panes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panes


def shortened(text: str, most: int, head: int = 0) -> str:
    """At most so many characters: the first `head` of them, an ellipsis, and the end."""
    return text if len(text) <= most else f"{text[:head]}…{text[head + 1 - most:]}"


def finish(figure: Figure, alt: str, text: str, *, colors: int = 0) -> Picture:
    """The figure as a Picture; the PNG carries no version and no date.

    colors: the size of a palette, which saves two thirds of the bytes of a large picture. 0 keeps every shade.
    """
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    if colors:
        whole, stream = Image.open(stream).convert("RGB"), io.BytesIO()
        whole.quantize(colors, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    width, height = (round(inches * 96) for inches in figure.get_size_inches())
    return Picture(stream.getvalue(), alt, text, width, height)


@dataclass(frozen=True)
class Table:
    """Rows under a heading. fills: a background for (row, column); notes: lines below; numbers align right.

    hidden: columns that only the HTML shows, for values that differ from run to run; code: columns in a monospace font.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    fills: dict[tuple[int, int], str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kept = [i for i, column in enumerate(self.columns) if column not in self.hidden]
        cells = [[shown(row[i]) for i in kept] for row in (self.columns, *self.rows)]
        right = [
            n
            for n, i in enumerate(kept)
            if all(isinstance(row[i], int | float) for row in self.rows)
        ]
        return "\n".join([self.title, *aligned(cells, right), *self.notes])

    def _repr_html_(self) -> str:
        def cell(row: int, column: int, value: Any) -> str:
            fill = self.fills.get((row, column))
            style = f"text-align:{'right' if isinstance(value, int | float) else 'left'}"
            style += f";background:{fill};color:{INK}" if fill else ""
            style += ";font-family:monospace" if self.columns[column] in self.code else ""
            text = shown(value)
            # a browser drops spaces at the start
            indent = "&nbsp;" * (len(text) - len(text.lstrip(" ")))
            return f"<td style='{style}'>{indent}{html.escape(text.lstrip(' '))}</td>"

        head = "".join(f"<th style='text-align:left'>{html.escape(c)}</th>" for c in self.columns)
        body = "".join("<tr>" + "".join(cell(i, j, v) for j, v in enumerate(row)) + "</tr>"
                       for i, row in enumerate(self.rows))
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        return (
            f"<b>{html.escape(self.title)}</b><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            + notes
        )


def shown(value: Any) -> str:
    """A cell's text: whole numbers with commas."""
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value)
    return f"{value:,}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *notes: str,
          code: Sequence[str] = ()) -> Table:
    """A table of plain values. code: columns in a monospace font."""
    return Table(title, tuple(columns), tuple(map(tuple, rows)), notes=notes, code=tuple(code))
