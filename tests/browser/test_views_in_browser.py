"""Every view, driven in JupyterLab in a headless Chromium: slider, search, click, zoom; and what stays without them."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from jupyter import run_all, write_notebook
from playwright.sync_api import ElementHandle, Page

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
CELLS = (
    "from workbench import author, build, capture, fake_world, load_recipe, show\n"
    'recipe = load_recipe("tour").override({"model.n_layers": 4})\n'
    "with fake_world(recipe.mesh.world_size) as world:\n"
    "    built = build(recipe, world)\n"
    "pair, records = built.step.pair, built.records",
    "show(recipe)",
    "show(pair)",
    "show(records)",
    'show(records[-1], "timeline")',
    'show(records[-1], "memory")',
    "show(records[-1])",
    'inductor = load_recipe("llama3_full_inductor").override({"mesh.tp": 2, "model.n_layers": 1})\n'
    "with fake_world(4) as world:\n"
    "    kernels = build(inductor, world).records[-1]\n"
    "show(kernels)",
    "from IPython.display import Image\nfrom workbench.notebook import draw\n"
    "Image(draw.pipeline(recipe).png, width=90, height=30)",  # as a reader's own picture
)
Look = Callable[[str], object]
GRAPH, PASSES, TIMELINE, MEMORY, KERNELS = 2, 3, 4, 5, 7
LABEL, READABLE = 12, 9  # pixels of a graph's labels at zoom 1, and at least


@pytest.fixture
def seen(page):
    """What a reader should never see: errors of the console, and addresses beyond this machine."""
    found: dict[str, list[str]] = {"errors": [], "beyond": []}
    page.on("console", lambda m: found["errors"].append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: found["errors"].append(str(error)))
    local = re.compile(r"(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|(data|blob|about):")
    page.on("request", lambda r: None if local.match(r.url) else found["beyond"].append(r.url))
    return found


def view_at(page: Page, cell: int) -> ElementHandle:
    def there() -> Any:  # Jupyter may draw the cells above it meanwhile, and push it off the screen
        page.evaluate("at => { jupyterapp.shell.currentWidget.content.scrollToItem(at); }", cell)
        time.sleep(0.3)
        return page.evaluate("""at => Boolean(document.querySelectorAll('.jp-Cell')[at]
            ?.querySelector('.wb[data-ready]')?.offsetParent)""", cell)

    until(there, 120)
    found = page.query_selector_all(".jp-Cell")[cell].query_selector(".wb[data-ready]")
    assert found is not None
    return found


def text(view: ElementHandle, role: str) -> str:
    found = view.query_selector(f'[data-role="{role}"]')
    assert found is not None
    return found.inner_text()


def control(page: Page, cell: int, kind: str, at: int = 0) -> ElementHandle:
    """A control above the view: what ipywidgets drew."""
    selector = {"slider": ".noUi-handle", "dropdown": ".widget-dropdown select", "text": ".widget-text input",
                "button": ".widget-button"}[kind]
    return page.query_selector_all(".jp-Cell")[cell].query_selector_all(selector)[at]


def pictures_above(page: Page, cell: int) -> list[ElementHandle]:
    """The static pictures of a cell that can be seen."""
    return [each for each in page.query_selector_all(".jp-Cell")[cell].query_selector_all(".jp-RenderedImage img")
            if each.is_visible()]


def until(holds: Any, seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it does not come"
        time.sleep(0.05)


def drive_graph(page: Page, looked_at: Look) -> None:
    view = view_at(page, GRAPH)
    boxes = int(view.get_attribute("data-boxes") or 0)
    assert 10 < boxes < 40
    assert not pictures_above(page, GRAPH)  # the live graph shows the same
    facts = view.query_selector("[data-role=details]")
    assert facts is not None and not facts.is_visible()  # until they are asked for
    assert view.evaluate("view => view.cy.zoom()") * LABEL >= READABLE
    view.query_selector("[data-role=graph]").scroll_into_view_if_needed()  # type: ignore[union-attr]
    at = view.evaluate("""view => { view.cy.center(view.cy.getElementById('forward/loss'));
        const at = view.cy.getElementById('forward/loss').renderedPosition();
        const box = view.querySelector('[data-role=graph]').getBoundingClientRect();
        return [box.x + at.x, box.y + at.y]; }""")
    page.mouse.click(*at)  # opens the module
    until(lambda: int(view.get_attribute("data-boxes") or 0) > boxes)
    assert facts.is_visible() and "forward/loss" in text(view, "details")
    facts.query_selector("button").click()  # type: ignore[union-attr]
    assert not facts.is_visible()
    search = control(page, GRAPH, "text")
    search.fill("return self.w2")
    search.press("Enter")
    until(lambda: "found" in text(view, "details"))
    view.query_selector_all(".wb-results button")[0].click()
    until(lambda: "read by" in text(view, "details"))
    said = text(view, "details")
    assert "layers.py:" in said and "layers.0.feed_forward" in said
    looked_at("view_graph")
    control(page, GRAPH, "button").click()  # the whole graph
    until(lambda: int(view.get_attribute("data-boxes") or 0) == boxes)


def drive_passes(page: Page, looked_at: Look) -> None:
    view = view_at(page, PASSES)
    assert text(view, "pass") == "1 of 4: inductor_decomposition"
    slider = control(page, PASSES, "slider")
    slider.focus()
    for _ in range(3):
        slider.press("ArrowRight")
    until(lambda: text(view, "pass") == "4 of 4: transformer_block_bucketing")
    view.query_selector("[data-role=code]").scroll_into_view_if_needed()  # type: ignore[union-attr]
    until(lambda: "_pre_bucket_all_gather" in text(view, "code"))
    assert "added" in text(view, "census") and "effect PASS" in text(view, "verdicts")
    short = len(text(view, "code"))
    control(page, PASSES, "dropdown", 1).select_option("4")  # lines around a change
    until(lambda: len(text(view, "code")) > short)
    control(page, PASSES, "dropdown", 0).select_option("backward")
    until(lambda: "reduce_scatter" in text(view, "code"))
    looked_at("view_passes")


def drive_kernels(page: Page, looked_at: Look) -> None:
    view = view_at(page, KERNELS)
    every = int(view.get_attribute("data-calls") or 0)
    control(page, KERNELS, "text").fill("silu")  # a node, or a kernel that it gave its name
    until(lambda: 0 < int(view.get_attribute("data-calls") or 0) < every)
    view.query_selector_all("[data-role=calls] button")[0].click()
    until(lambda: 'extern "C"' in text(view, "source"))
    assert "layers.0.feed_forward" in text(view, "source")
    looked_at("view_kernels")


def test_every_view_is_driven_and_every_picture_stays(page, lab, seen, lab_folder, looked_at):
    path = lab_folder / "views.ipynb"
    write_notebook(path, CELLS)
    run_all(page, lab.format(path.name))
    for drive in (drive_graph, drive_passes, drive_kernels):
        drive(page, looked_at)
    for cell in (TIMELINE, MEMORY):  # test_moments_in_pages.py zooms and moves them
        assert view_at(page, cell) and not pictures_above(page, cell)
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })")
    time.sleep(1)
    for cell, name in ((GRAPH, "graph"), (PASSES, "passes"), (TIMELINE, "timeline"), (MEMORY, "memory"),
                       (KERNELS, "kernels")):
        view = view_at(page, cell)
        until(lambda v=view: v.evaluate("""view => [view, ...view.querySelectorAll('*')].filter(each => each.cy)
            .every(each => each.cy.width() > 100)"""))  # JupyterLab hides the page while it changes its theme
        looked_at(f"view_{name}_dark")
    still = page.query_selector_all(".jp-RenderedImage img")
    found = {(each.get_attribute("width") == "90", "invert" in each.evaluate("img => getComputedStyle(img).filter"))
             for each in still}
    assert found == {(True, False), (False, True)}  # the reader's own picture stays as it is
    assert seen == {"errors": [], "beyond": []}
