"""What a reader sees in JupyterLab, in a headless Chromium: pictures, no errors, and cells that run."""

from collections.abc import Callable

import pytest
from jupyter import run_all, write_notebook
from playwright.sync_api import Page
from test_moments_in_pages import on

Look = Callable[[str], object]
FIRST_RESULT_SECONDS = 60
RESULT = ".jp-OutputArea .jp-RenderedImage img:visible, .jp-OutputArea .jp-RenderedHTMLCommon table:visible"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]


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


def test_a_link_to_the_glossary_opens_it_at_its_term(page: Page, lab: str, looked_at: Look) -> None:
    errors = open_notebook(page, lab, "02_capture_a_joint_graph")
    for anchor in ("saved-tensors", "fsdp"):  # an entry in small letters, and a name
        page.locator(f'.jp-Notebook a[href*="glossary.md"][href$="#{anchor}"]').first.click()
        heading = page.wait_for_selector(f'.jp-MarkdownViewer [data-jupyter-id="{anchor}"]', state="attached")
        page.wait_for_function("""each => Math.abs(each.getBoundingClientRect().top
            - each.closest('.jp-MarkdownViewer').getBoundingClientRect().top) < 60""", arg=heading)
        looked_at(f"glossary_{anchor}")
        page.evaluate("() => jupyterapp.commands.execute('application:activate-previous-tab')")
    assert errors == []


LIVE = (
    "from ipywidgets import Label\nfrom workbench import show\n"
    "from workbench_lessons.l01_author_with_dtensor.placement_lab import PlacementLab\n"
    "lab = PlacementLab()\nfigures = Label()\n"
    'lab.observe(lambda _: setattr(figures, "value", f"in the kernel: {lab.result()}"), "w_0")\nfigures',
    "show(lab)",
)


def test_a_choice_in_jupyterlab_reaches_the_kernel_and_its_controls(page, lab, lab_folder, looked_at) -> None:  # type: ignore[no-untyped-def]
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
    looked_at("placement_live")
