"""The course's site, walked page by page without a kernel and without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page
from test_moments_in_pages import on
from test_pages_without_kernel import STATE
from unpacked import unpacked

from workbench.notebook.lessons.course_site import write_site
from workbench.notebook.lessons.headless import notebooks_dir
from workbench.notebook.lessons.lesson import lesson_names

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
VIEWS = {"00_tour": ["chips"], "01_author_with_dtensor": ["placement"],
         "03_split_forward_and_backward": ["partitioner", "partitioner"],
         "05_bucket_and_overlap": ["order", "timeline", "race"],
         "09_route_tokens_to_experts": ["timeline"], "10_run_on_real_ranks": ["counters"]}
LINKS = "found => found.map(each => each.getAttribute('href')).filter(each => each && !/^\\w+:/.test(each))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(lesson_names(), tmp_path_factory.mktemp("site") / "course").parent


@pytest.fixture
def alone(page: Page) -> dict[str, list[str]]:
    """The page has no network; what it asks for beyond the folder, and its errors."""
    found: dict[str, list[str]] = {"errors": [], "beyond": []}
    page.on("pageerror", lambda error: found["errors"].append(str(error)))
    page.on("request", lambda r: None if re.match("(file|data|blob):", r.url) else found["beyond"].append(r.url))
    page.context.set_offline(True)
    return found


def test_every_page_is_reached_and_every_link_leads_somewhere(site, page, alone) -> None:  # type: ignore[no-untyped-def]
    todo, seen, wanted = ["index.html"], {}, []
    while todo:
        name = todo.pop()
        assert (site / name).stat().st_size < 3_000_000
        page.goto((site / name).as_uri(), wait_until="domcontentloaded")
        seen[name] = set(page.eval_on_selector_all("[id]", "found => found.map(each => each.id)"))
        for link in page.eval_on_selector_all("a", LINKS):
            target, _, anchor = link.partition("#")
            wanted.append((name, target or name, anchor))
            if target and target not in seen and target not in todo and (site / target).is_file():
                todo.append(target)
    assert {path.name for path in site.glob("*.html")} - set(seen) == {"design.html"}  # usage links to it, as text
    assert not [(name, target) for name, target, _ in wanted if target not in seen]
    assert not [each for each in wanted if each[2] and each[1] == "glossary.html" and each[2] not in seen[each[1]]]
    assert alone == {"errors": [], "beyond": []}


def recorded(name: str) -> list[tuple[str, dict]]:  # type: ignore[type-arg]
    """The views of a lesson, by kind, with what Python recorded in its notebook."""
    models = json.loads((notebooks_dir() / f"{name}.ipynb").read_text())["metadata"]["widgets"][STATE]["state"]
    return [(each["state"]["kind"], unpacked(each["state"]["data"])) for each in models.values()
            if each["model_name"] == "AnyModel"]


def test_the_lessons_with_views_are_these() -> None:
    texts = {name: (notebooks_dir() / f"{name}.ipynb").read_text() for name in lesson_names()}
    assert {name for name, text in texts.items() if STATE in text} == set(VIEWS)
    assert {name: sorted(kind for kind, _ in recorded(name)) for name in VIEWS} == {
        name: sorted(kinds) for name, kinds in VIEWS.items()}


@pytest.mark.parametrize("name", VIEWS)
def test_each_view_is_used_and_shows_the_figures_of_python(name, site, page, alone) -> None:  # type: ignore[no-untyped-def]
    page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
    page.wait_for_function(f"document.querySelectorAll('.wb[data-ready]').length === {len(VIEWS[name])}")
    views = [(each.get_attribute("data-view"), each) for each in page.query_selector_all(".wb")]
    assert [kind for kind, _ in views] == VIEWS[name]
    written = recorded(name)
    for kind, view in views:
        data = next(each for each in written if each[0] == kind and fits(*each, view))
        written.remove(data)
        use(kind, view, data[1])
    assert alone == {"errors": [], "beyond": []} and not written


def fits(kind: str, data: dict, view) -> bool:  # type: ignore[no-untyped-def, type-arg]
    """Whether this is the data of this view: a page may have two boards."""
    return kind != "partitioner" or {box[1] for box in data["boxes"] if box[1]} <= set(view.inner_text().split())


def use(kind: str, view, data: dict) -> None:  # type: ignore[no-untyped-def, type-arg]
    """Change one thing by the keyboard; before and after, the page shows what Python recorded."""
    def shown(*names: str) -> list[str]:
        return [view.get_attribute(f"data-{name}") for name in names]

    if kind == "chips":
        ours, theirs = data["given"]
        for passes in (theirs, []):
            figures = data["runs"][f"{' '.join(ours)}|{' '.join(passes)}"]["figures"]
            assert shown("launches", "saved") == [str(figures["launches"]), str(figures["bytes saved"])]
            on(view, theirs[0], *["Enter"] * bool(passes))
    elif kind == "placement":
        for w_0 in ("rows", "columns"):
            found = data["table"][f"rows columns {w_0} columns"]
            assert shown("bytes", "added") == [str(found["bytes"]), str(len(found["added"]))]
            on(view, "w_0", "Enter")
    elif kind == "partitioner":
        kept = [box[0] for box in data["boxes"] if box[1]]
        for saved in (kept, kept[1:]):
            cut = next(each for each in data["cuts"] if sorted(each[0]) == sorted(saved))
            assert shown("bytes", "flop") == [str(cut[1]), str(cut[2])]
            on(view, kept[0], "Enter")
    elif kind == "counters":
        axis = data["axes"][1]
        for launched in ("", axis):
            state = "|".join([launched, *[""] * (data["size"] - 1)])
            assert shown("waits") == [" ".join(map(str, data["states"][state]))]
            on(view, f"0: {axis}", *["Enter"] * (not launched))
    elif kind == "order":
        text = (notebooks_dir() / "05_bucket_and_overlap.ipynb").read_text()
        exposed, peak = re.search(r"as captured  +(\d\.\d+) +[\d.]+ +(\d[\d,]+)", text).groups()  # type: ignore[union-attr]
        exposed = f"{float(exposed):.4f}"
        assert shown("exposed", "peak") == [exposed, peak.replace(",", "")]
        view.query_selector_all("rect[role=button]")[1].press("ArrowLeft")
        assert shown("exposed") != [exposed]  # on other orders, test_collective_order compares both simulators
    elif kind == "race":
        for winner in dict.fromkeys(data["winners"].values()):
            on(view, next(place for place, name in data["winners"].items() if name == winner), "Enter")
            assert shown("winner") == [winner]
    else:
        assert shown("spans") == [str(sum(len(part["spans"]) for part in data["runs"]))]
        before = view.query_selector("canvas").evaluate("canvas => canvas.toDataURL()")
        view.query_selector("canvas").press("+")
        assert view.query_selector("canvas").evaluate("canvas => canvas.toDataURL()") != before


def test_the_index_leads_to_each_lesson(site, page, alone, looked_at) -> None:  # type: ignore[no-untyped-def]
    page.goto((site / "index.html").as_uri())
    assert page.locator("table a").count() == len(lesson_names())
    looked_at("site_index")
    page.click("table a >> nth=0")
    page.click("nav a:has-text('Next')")
    page.click("nav a:has-text('Contents')")
    assert page.url == (site / "index.html").as_uri()
    assert alone == {"errors": [], "beyond": []}
