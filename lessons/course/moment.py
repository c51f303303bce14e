"""The base of the views that hold their own data."""

from __future__ import annotations

import traitlets

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

    def result(self) -> dict[str, float]:
        """The figures, to be graded. WorkbenchError with the message where there are none."""
        if self.message:
            raise WorkbenchError(self.message)
        return dict(self.figures)

    def picture(self) -> Picture | Table:
        """The static picture beside the view, for where no script runs."""
        raise NotImplementedError
