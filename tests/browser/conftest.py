"""JupyterLab on a copy of the notebooks, and a page to look at them."""

import shutil
from collections.abc import Callable, Iterator
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
    with new_page() as made:
        yield made


@pytest.fixture
def looked_at(page: Page) -> Callable[[str], object]:
    """Keeps what the page shows, under a name, for people."""
    folder = ROOT / "out" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: page.screenshot(path=folder / f"{name}.png")
