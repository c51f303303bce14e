"""JupyterLab on a folder and a page of a headless Chromium: for the tests that look, and for benchmarks/views.py."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import ElementHandle, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
IDLE = "() => globalThis.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RAN = """() => {
    const { content, sessionContext } = jupyterapp.shell.currentWidget;
    const code = content.model.toJSON().cells.filter(cell => cell.cell_type === 'code');
    const failed = code.some(cell => cell.outputs.some(output => output.output_type === 'error'));
    return failed || code.every(cell => cell.execution_count) && sessionContext.session?.kernel?.status === 'idle';
}"""


def _written_whole(runtime: Path) -> dict[str, Any] | None:
    """What the server says of itself; its file is there before its text is."""
    for path in runtime.glob("jpserver-*.json"):
        with suppress(json.JSONDecodeError):
            return dict(json.loads(path.read_text()))
    return None


@contextmanager
def jupyterlab(served: Path) -> Iterator[str]:
    """A server on the folder, its own files beside it; gives the address, with {} for the name of a notebook."""
    folder = served.parent
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
               "--LabApp.expose_app_in_browser=True", f"--notebook-dir={served}"]
    environment = {**os.environ, **own, "WORKBENCH_PROGRESS": "0", "JUPYTER_PLATFORM_DIRS": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        try:
            deadline = time.monotonic() + 60
            while not (said := _written_whole(folder / "runtime")):
                assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.1)
            # without `reset` it opens what the last page left open, and may ask about it
            yield f"{said['url']}lab/tree/{{}}?token={said['token']}&reset"
        finally:
            server.terminate()
            server.wait(30)


@contextmanager
def new_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser.new_page(viewport={"width": 1300, "height": 1000})
        finally:
            browser.close()


def write_notebook(path: Path, cells: tuple[str, ...]) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    written = [{"cell_type": "code", "id": f"cell-{i}", "metadata": {}, "execution_count": None, "outputs": [],
                "source": source} for i, source in enumerate(cells)]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel},
                                "cells": written}))


def run_all(page: Page, address: str, seconds: float = 180) -> None:
    """Open a notebook and run its cells, until all have run or one has failed."""
    page.goto(address)
    page.wait_for_function(IDLE, timeout=120_000)
    page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells'); }")
    page.wait_for_function(RAN, timeout=seconds * 1000)


def on(view: ElementHandle, key: str, *presses: str) -> None:
    """Focus what has this key, and press; the focus stays with it when the view draws again."""
    for each in presses:
        found = view.query_selector(f"[data-key='{key}']")
        assert found is not None, key
        found.focus()
        found.press(each)
