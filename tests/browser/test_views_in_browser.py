"""JupyterLab in a headless Chromium: every view is driven, and links and choices lead where they should."""

import time
from typing import Any

import pytest
from jupyter import on, run_all, write_notebook
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
GRAPH, PASSES, TIMELINE, MEMORY, KERNELS = 2, 3, 4, 5, 7
LABEL, READABLE = 12, 9  # pixels of a graph's labels at zoom 1, and at least


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


def drive_graph(page: Page) -> None:
    view = view_at(page, GRAPH)
    boxes = int(view.get_attribute("data-boxes") or 0)
    assert 10 < boxes < 40
    assert not pictures_above(page, GRAPH)  # the live graph shows the same
    facts = view.query_selector("[data-role=details]")
    assert facts is not None and not facts.is_visible()  # until they are asked for
    assert view.evaluate("view => view.cy.zoom()") * LABEL >= READABLE
    view.query_selector("[data-role=graph]").scroll_into_view_if_needed()
    at = view.evaluate("""view => { view.cy.center(view.cy.getElementById('forward/loss'));
        const at = view.cy.getElementById('forward/loss').renderedPosition();
        const box = view.querySelector('[data-role=graph]').getBoundingClientRect();
        return [box.x + at.x, box.y + at.y]; }""")
    page.mouse.click(*at)  # opens the module
    until(lambda: int(view.get_attribute("data-boxes") or 0) > boxes)
    assert facts.is_visible() and "forward/loss" in text(view, "details")
    facts.query_selector("button").click()
    assert not facts.is_visible()
    search = control(page, GRAPH, "text")
    search.fill("return self.w2")
    search.press("Enter")
    until(lambda: "found" in text(view, "details"))
    view.query_selector_all(".wb-results button")[0].click()
    until(lambda: "read by" in text(view, "details"))
    said = text(view, "details")
    assert "layers.py:" in said and "layers.0.feed_forward" in said
    control(page, GRAPH, "button").click()  # the whole graph
    until(lambda: int(view.get_attribute("data-boxes") or 0) == boxes)


def drive_passes(page: Page) -> None:
    view = view_at(page, PASSES)
    assert text(view, "pass") == "1 of 4: inductor_decomposition"
    slider = control(page, PASSES, "slider")
    slider.focus()
    for _ in range(3):
        slider.press("ArrowRight")
    until(lambda: text(view, "pass") == "4 of 4: transformer_block_bucketing")
    view.query_selector("[data-role=code]").scroll_into_view_if_needed()
    until(lambda: "_pre_bucket_all_gather" in text(view, "code"))
    assert "added" in text(view, "census") and "effect PASS" in text(view, "verdicts")
    short = len(text(view, "code"))
    control(page, PASSES, "dropdown", 1).select_option("4")  # lines around a change
    until(lambda: len(text(view, "code")) > short)
    control(page, PASSES, "dropdown", 0).select_option("backward")
    until(lambda: "reduce_scatter" in text(view, "code"))


def drive_kernels(page: Page) -> None:
    view = view_at(page, KERNELS)
    every = int(view.get_attribute("data-calls") or 0)
    control(page, KERNELS, "text").fill("silu")  # a node, or a kernel that it gave its name
    until(lambda: 0 < int(view.get_attribute("data-calls") or 0) < every)
    view.query_selector_all("[data-role=calls] button")[0].click()
    until(lambda: 'extern "C"' in text(view, "source"))
    assert "layers.0.feed_forward" in text(view, "source")


def test_every_view_is_driven_and_every_picture_stays(page, lab, seen, lab_folder):
    path = lab_folder / "views.ipynb"
    write_notebook(path, CELLS)
    run_all(page, lab.format(path.name))
    for drive in (drive_graph, drive_passes, drive_kernels):
        drive(page)
    for cell in (TIMELINE, MEMORY):  # test_pages_without_kernel.py zooms and moves them
        assert view_at(page, cell) and not pictures_above(page, cell)
    page.evaluate("() => jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })")
    time.sleep(1)
    for cell in (GRAPH, PASSES, TIMELINE, MEMORY, KERNELS):
        view = view_at(page, cell)
        until(lambda v=view: v.evaluate("""view => [view, ...view.querySelectorAll('*')].filter(each => each.cy)
            .every(each => each.cy.width() > 100)"""))  # JupyterLab hides the page while it changes its theme
    still = page.query_selector_all(".jp-RenderedImage img")
    found = {(each.get_attribute("width") == "90", "invert" in each.evaluate("img => getComputedStyle(img).filter"))
             for each in still}
    assert found == {(True, False), (False, True)}  # the reader's own picture stays as it is
    assert seen == {"errors": [], "beyond": []}


def test_a_link_to_the_glossary_opens_it_at_its_term(page, lab, seen):
    page.goto(lab.format("02_capture_a_joint_graph.ipynb"))
    for anchor in ("saved-tensors", "fsdp"):  # an entry in small letters, and a name
        page.locator(f'.jp-Notebook a[href*="glossary.md"][href$="#{anchor}"]').first.click(timeout=60_000)
        heading = page.wait_for_selector(f'.jp-MarkdownViewer [data-jupyter-id="{anchor}"]', state="attached")
        page.wait_for_function("""each => Math.abs(each.getBoundingClientRect().top
            - each.closest('.jp-MarkdownViewer').getBoundingClientRect().top) < 60""", arg=heading)
        page.evaluate("() => jupyterapp.commands.execute('application:activate-previous-tab')")
    assert seen == {"errors": [], "beyond": []}


LIVE = (
    "from ipywidgets import Label\nfrom workbench import show\n"
    "from workbench_lessons.l01_author_with_dtensor.placement_lab import PlacementLab\n"
    "lab = PlacementLab()\nfigures = Label()\n"
    'lab.observe(lambda _: setattr(figures, "value", f"in the kernel: {lab.result()}"), "w_0")\nfigures',
    "show(lab)",
)


def test_a_choice_reaches_the_kernel_and_its_controls(page, lab, lab_folder):
    write_notebook(lab_folder / "live.ipynb", LIVE)
    run_all(page, lab.format("live.ipynb"))
    view = page.wait_for_selector(".wb[data-ready]")
    picture = page.query_selector_all(".jp-RenderedImage")
    assert len(picture) == 1 and not picture[0].is_visible()
    on(view, "x_1", "Enter")  # columns, replicate
    on(view, "w_0", "Enter", "Enter")  # rows, columns, replicate
    page.wait_for_selector("text=in the kernel: {'cost in bytes': 196608, 'collectives DTensor adds': 0}")
    assert view.get_attribute("data-bytes") == "196608"
    chosen = page.locator(".widget-dropdown select")
    assert [chosen.nth(i).evaluate("each => each.selectedOptions[0].textContent.trim()") for i in range(4)] == [
        "rows", "replicate", "replicate", "columns"]
    chosen.nth(2).select_option("columns")
    page.wait_for_selector("text=in the kernel: {'cost in bytes':")
    page.wait_for_function("document.querySelector('.wb').dataset.bytes !== '196608'")
