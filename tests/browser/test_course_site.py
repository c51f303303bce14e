"""The course's site, walked page by page without a kernel and without a network."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page

from workbench_lessons.course.course_site import write_site
from workbench_lessons.course.lesson import lesson_names

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
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


def test_every_page_is_reached_and_every_link_leads_somewhere(site, page, alone, looked_at) -> None:  # type: ignore[no-untyped-def]
    page.goto((site / "index.html").as_uri())
    looked_at("site_index")
    for link in ("table a >> nth=0", "nav a:has-text('Next')", "nav a:has-text('Contents')"):
        page.click(link)
    assert page.url == (site / "index.html").as_uri() and page.locator("table a").count() == len(lesson_names())
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
    assert {path.name for path in site.glob("*.html")} - set(seen) == set()
    assert not [(name, target) for name, target, _ in wanted if target not in seen]
    assert not [each for each in wanted if each[2] and each[1] == "glossary.html" and each[2] not in seen[each[1]]]
    assert alone == {"errors": [], "beyond": []}
