"""JupyterLab on a copy of the notebooks, and a page to look at them."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter import CHROMIUM, jupyterlab, new_page
from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the notebooks, in a copy of what they link to."""
    checkout = tmp_path_factory.mktemp("lab") / "checkout"
    shutil.copytree(ROOT / "docs", checkout / "docs")
    return Path(shutil.copytree(ROOT / "notebooks", checkout / "notebooks"))


@pytest.fixture(scope="module")
def lab(lab_folder: Path) -> Iterator[str]:
    """JupyterLab's address, without the name of a notebook."""
    with jupyterlab(lab_folder.parent) as address:  # as `make lab` does
        yield address.format("notebooks/{}")


@pytest.fixture
def page() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    errors: list[str] = []
    with new_page() as made:
        made.on("pageerror", lambda error: errors.append(str(error)))
        yield made
    assert errors == []


@pytest.fixture
def seen(page: Page) -> dict[str, list[str]]:
    """What a reader should never see: errors of the console, and addresses beyond this machine."""
    found: dict[str, list[str]] = {"errors": [], "beyond": []}
    page.on("console", lambda m: found["errors"].append(m.text) if m.type == "error" else None)
    local = re.compile(r"(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|(file|data|blob|about):")
    page.on("request", lambda r: None if local.match(r.url) else found["beyond"].append(r.url))
    return found
