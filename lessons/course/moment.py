"""The base of the views that hold their own data."""

from __future__ import annotations

from typing import Any

import traitlets
from ipywidgets import Button

from workbench.errors import WorkbenchError
from workbench.notebook.draw.picture import Picture, Table
from workbench.notebook.views.controls import OwnData


class Moment(OwnData):
    """A view that changes something, and whose result can be graded.

    message: what is wrong with the state, in the words of the check that refuses it; the page shows it.
    figures: what the state costs, for a checkpoint; empty where there is a message.
    """

    message = traitlets.Unicode().tag(sync=True)
    figures = traitlets.Dict()

    def setting(self, description: str, **values: Any) -> Button:
        """A button that sets traits, all at once."""
        button = Button(description=description)
        button.on_click(lambda _: self.take(**values))
        self.presses = [*self.presses, [button, values]]
        return button

    def take(self, **values: Any) -> None:
        """Set several traits at once."""
        with self.hold_trait_notifications():
            for name, value in values.items():
                setattr(self, name, value)

    def result(self) -> dict[str, float]:
        """The figures, to be graded. WorkbenchError with the message where there are none."""
        if self.message:
            raise WorkbenchError(self.message)
        return dict(self.figures)

    def picture(self) -> Picture | Table:
        """The static picture beside the view, for where no script runs."""
        raise NotImplementedError
