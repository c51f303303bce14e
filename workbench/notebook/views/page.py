"""What makes the views with data of their own, and their controls, work in a page that nbconvert has made."""

from __future__ import annotations

from workbench.notebook.views.controls import STATIC


class PageScript:
    """A script that a saved page runs once: it draws the views whose state the page holds, without a network.

    JupyterLab draws them itself, and the script leaves it alone.
    """

    def _repr_html_(self) -> str:
        return f"<script>{(STATIC / 'page.js').read_text(encoding='utf-8').strip()}</script>"

    def __repr__(self) -> str:
        return "(this view also works in a saved page)"
