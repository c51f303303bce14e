"""What a reader sees in JupyterLab, in a headless Chromium: pictures, no errors, and cells that run."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(p.stem for p in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
FIRST_PICTURE_SECONDS, RUN_SECONDS = 60, 180

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def chromium() -> str:
    if CHROMIUM is None and "CI" in os.environ:
        pytest.fail("no Chromium: apt-get install chromium")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return CHROMIUM


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a copy of the notebooks; its address, without the name of a notebook."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
               "--LabApp.expose_app_in_browser=True", f"--notebook-dir={folder / 'notebooks'}"]
    environment = {**os.environ, **own, "WORKBENCH_PROGRESS": "0", "JUPYTER_PLATFORM_DIRS": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        try:
            deadline = time.monotonic() + 60
            while not (found := list((folder / "runtime").glob("jpserver-*.json"))):
                assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.1)
            said = json.loads(found[0].read_text())
            # without `reset` it opens what the last page left open, and may ask about it
            yield f"{said['url']}lab/tree/{{}}?token={said['token']}&reset"
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture
def page(chromium: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1300, "height": 1000})
        finally:
            browser.close()


def open_notebook(page: Page, lab: str, name: str) -> list[str]:
    """Open it; the list that grows with what the browser's console calls an error."""
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(lab.format(f"{name}.ipynb"))
    picture = page.wait_for_selector(".jp-RenderedImage img", timeout=FIRST_PICTURE_SECONDS * 1000)
    assert picture is not None and picture.evaluate("img => img.complete && img.naturalWidth") > 300
    return errors


def looked_at(page: Page, name: str) -> None:
    folder = ROOT / "out" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_picture_is_on_the_screen_within_a_minute(page: Page, lab: str, name: str) -> None:
    started = time.monotonic()
    errors = open_notebook(page, lab, name)
    assert time.monotonic() - started < FIRST_PICTURE_SECONDS
    looked_at(page, name)
    assert errors == []


RAN = """() => {
    const { content, sessionContext } = jupyterapp.shell.currentWidget;
    const code = content.model.toJSON().cells.filter(cell => cell.cell_type === 'code');
    return code.every(cell => cell.execution_count) && sessionContext.session?.kernel?.status === 'idle';
}"""
CELLS = "() => jupyterapp.shell.currentWidget.content.model.toJSON().cells"


def outputs(page: Page) -> list[list[dict[str, Any]]]:
    return [c["outputs"] for c in page.evaluate(CELLS) if c["cell_type"] == "code"]


def test_all_cells_run_and_show_what_was_committed(page: Page, lab: str) -> None:
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
        looked_at(page, f"{name}_run")
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
