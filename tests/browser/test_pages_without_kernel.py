"""A page that nbconvert makes of an executed notebook: its views work without a kernel and without a network."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT
from jupyter import write_notebook
from playwright.sync_api import Page

from workbench import fake_world
from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
CELLS = (
    "from stack import split\nfrom workbench import fake_world, show\n"
    "from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder\n"
    "from workbench.notebook.views import GraphView\n"
    "with fake_world(2) as world:\n    pair = split(world)",
    'show(CollectiveOrder(pair.backward, "h200x2"))',
    "from IPython.display import display\nfrom workbench.notebook import draw\n"
    'display(draw.graph(pair.forward), CollectiveOrder(pair.forward, "h200x2"))',  # a picture that is no twin
    "GraphView(pair.forward)",
)
ANSWER = """async (element, key) => {
    const begun = performance.now();
    element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    return performance.now() - begun;
}"""
"""Milliseconds from a key until the page has drawn what follows."""
STATE = "application/vnd.jupyter.widget-state+json"


def nbconvert(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT)))}
    done = subprocess.run([sys.executable, "-m", "nbconvert", *arguments], capture_output=True, text=True, timeout=200,
                          env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def executed(path: Path, cells: Sequence[str]) -> Path:
    """A notebook of these cells, executed as the committed notebooks are."""
    write_notebook(path, cells)
    nbconvert("--config", str(ROOT / ".ci" / "execute_notebooks.py"), "--execute", "--to", "notebook", "--inplace",
              str(path))
    return path


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return executed(tmp_path_factory.mktemp("pages") / "page.ipynb", CELLS)


def test_a_notebook_keeps_little_and_the_same_each_time(notebook: Path) -> None:
    text = notebook.read_text()
    kept = json.loads(text)
    models = kept["metadata"]["widgets"][STATE]["state"]
    views = [each for each in models.values() if each["model_name"] == "AnyModel"]
    assert len(views) == 2 and all(len(json.dumps(each)) < 100_000 for each in views)
    assert sorted(models) == [f"{i:032x}" for i in range(len(models))]
    shown = [o["data"]["application/vnd.jupyter.widget-view+json"]["model_id"] for c in kept["cells"]
             for o in c["outputs"] if "application/vnd.jupyter.widget-view+json" in o.get("data", ())]
    assert shown[0] in models and shown[-1] == ""  # the graph's view has nothing to show without its kernel


def test_a_page_works_offline(notebook: Path, page: Page, looked_at) -> None:  # type: ignore[no-untyped-def]
    nbconvert("--to", "html", str(notebook))
    html = notebook.with_suffix(".html")
    assert html.stat().st_size < 3_000_000
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.context.set_offline(True)
    page.goto(html.as_uri(), wait_until="domcontentloaded")
    view = page.wait_for_selector(".wb[data-ready]")
    assert view is not None
    with fake_world(2) as world:
        from stack import split

        twin = CollectiveOrder(split(world).backward, "h200x2")
    assert float(view.get_attribute("data-exposed") or 0) == twin.figures["exposed ms"]
    assert int(view.get_attribute("data-peak") or 0) == twin.figures["peak bytes"]
    picture = page.query_selector(".jp-RenderedImage")
    assert picture is not None and not picture.is_visible()  # its live twin is shown
    page.wait_for_function("document.querySelectorAll('.wb[data-ready]').length === 2")
    assert page.query_selector_all(".jp-RenderedImage")[1].is_visible()
    keys = {"compute", "all-gather", "reduce-scatter", "exposed collective", "compute waits", "0 ms"}
    assert keys <= {each.text_content() for each in view.query_selector_all("text")}
    bar = view.query_selector_all("rect[role=button]")[1]
    bar.focus()
    assert bar.evaluate(ANSWER, "ArrowLeft") < 300
    moved = float(view.get_attribute("data-exposed") or 0)
    assert moved != twin.figures["exposed ms"]
    chosen = page.query_selector("select")
    assert chosen is not None and chosen.input_value() == view.query_selector(
        "rect[stroke-width='3']").get_attribute("data-key")  # type: ignore[union-attr]
    page.query_selector("input[type=checkbox]").check()  # type: ignore[union-attr]
    assert "overlap_collectives: " in view.inner_text()
    looked_at("page_without_kernel")
    page.keyboard.press("Escape")
    assert errors == []
    still = page.context.browser.new_context(java_script_enabled=False, offline=True).new_page()  # type: ignore[union-attr]
    still.goto(html.as_uri(), wait_until="domcontentloaded")
    assert still.locator(".jp-RenderedImage img").first.is_visible()  # where scripts are not allowed, it stands
