"""What a reader sees in JupyterLab, in a headless Chromium: pictures, no errors, and cells that run."""

from __future__ import annotations

import configparser
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
Look = Callable[[str], object]
NOTEBOOKS = sorted(p.stem for p in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
FIRST_RESULT_SECONDS, RUN_SECONDS = 60, 180
RESULT = ".jp-OutputArea .jp-RenderedImage img:visible, .jp-OutputArea .jp-RenderedHTMLCommon table:visible"

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


def open_notebook(page: Page, lab: str, name: str) -> list[str]:
    """Open it; the list that grows with what the browser's console calls an error."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(lab.format(f"{name}.ipynb"))
    shown = page.wait_for_selector(RESULT, timeout=FIRST_RESULT_SECONDS * 1000)
    assert shown is not None
    picture = "e => e.tagName === 'IMG' ? e.complete && e.naturalWidth > 200 : e.rows.length > 1 && e.offsetWidth > 100"
    assert shown.evaluate(picture)
    return errors


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "00_tour" else pytest.mark.slow) for name in NOTEBOOKS])
def test_the_first_result_is_on_the_screen_within_a_minute(page: Page, lab: str, looked_at: Look, name: str) -> None:
    started = time.monotonic()
    errors = open_notebook(page, lab, name)
    assert time.monotonic() - started < FIRST_RESULT_SECONDS
    looked_at(name)
    assert errors == []


RAN = """() => {
    const { content, sessionContext } = jupyterapp.shell.currentWidget;
    const code = content.model.toJSON().cells.filter(cell => cell.cell_type === 'code');
    return code.every(cell => cell.execution_count) && sessionContext.session?.kernel?.status === 'idle';
}"""
CELLS = "() => jupyterapp.shell.currentWidget.content.model.toJSON().cells"


def outputs(page: Page) -> list[list[dict[str, Any]]]:
    return [c["outputs"] for c in page.evaluate(CELLS) if c["cell_type"] == "code"]


def test_all_cells_run_and_show_what_was_committed(page: Page, lab: str, looked_at: Look) -> None:
    name = "02_capture_a_joint_graph"
    errors = open_notebook(page, lab, name)
    committed = outputs(page)
    page.wait_for_function("() => jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")
    page.evaluate("() => jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    assert not any(outputs(page))
    page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells'); }")  # waited for below, with a limit
    try:
        page.wait_for_function(RAN, timeout=RUN_SECONDS * 1000)
    finally:
        looked_at(f"{name}_run")
    again = outputs(page)
    assert [o["output_type"] for cell in again for o in cell] == [o["output_type"] for cell in committed for o in cell]

    rules = configparser.RawConfigParser()
    rules.read(ROOT / ".ci" / "nbval_sanitize.cfg")

    def text(cells: list[list[dict[str, Any]]]) -> list[str]:
        found = ["".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for cell in cells for o in cell]
        for rule in map(dict, (rules[name] for name in rules.sections())):
            found = [re.sub(rule["regex"], rule["replace"], each) for each in found]
        return found

    assert text(again) == text(committed)
    assert errors == []
