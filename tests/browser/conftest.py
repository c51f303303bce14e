"""JupyterLab on a copy of the notebooks, and a page of a headless Chromium, for the tests that look at them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def chromium() -> str:
    if CHROMIUM is None and "CI" in os.environ:
        pytest.fail("no Chromium: apt-get install chromium")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return CHROMIUM


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where JupyterLab finds its notebooks: a copy of them."""
    folder = tmp_path_factory.mktemp("lab")
    return Path(shutil.copytree(ROOT / "notebooks", folder / "notebooks"))


@pytest.fixture(scope="module")
def lab(lab_folder: Path) -> Iterator[str]:
    """JupyterLab's address, without the name of a notebook."""
    folder = lab_folder.parent
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


@pytest.fixture
def looked_at(page: Page) -> Callable[[str], object]:
    """Keeps what the page shows, under a name, for people."""
    folder = ROOT / "out" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: page.screenshot(path=folder / f"{name}.png")
