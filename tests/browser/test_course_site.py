"""The course's site, walked page by page without a kernel and without a network."""

from pathlib import Path

import pytest

from workbench_lessons.course.course_site import write_site
from workbench_lessons.course.lesson import lesson_names

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
LINKS = "found => found.map(each => each.getAttribute('href')).filter(each => each && !/^\\w+:/.test(each))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(lesson_names(), tmp_path_factory.mktemp("site") / "course").parent


WIDE = "() => document.documentElement.scrollWidth - innerWidth"
PAPER = "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"


def test_every_page_is_reached_and_every_link_leads_somewhere(site, page, seen):
    page.context.set_offline(True)
    page.goto((site / "index.html").as_uri())
    for link in ("table a >> nth=0", "nav a:has-text('Next')", "nav a:has-text('Contents')"):
        page.click(link)
    assert page.url == (site / "index.html").as_uri() and page.locator("table a").count() == len(lesson_names())
    todo, ids, wanted = ["index.html"], {}, []
    while todo:
        name = todo.pop()
        assert (site / name).stat().st_size < 3_000_000
        page.goto((site / name).as_uri(), wait_until="domcontentloaded")
        ids[name] = set(page.eval_on_selector_all("[id]", "found => found.map(each => each.id)"))
        for link in page.eval_on_selector_all("a", LINKS):
            target, _, anchor = link.partition("#")
            wanted.append((name, target or name, anchor))
            if target and target not in ids and target not in todo and (site / target).is_file():
                todo.append(target)
    assert {path.name for path in site.glob("*.html")} - set(ids) == set()
    assert not [(name, target) for name, target, _ in wanted if target not in ids]
    assert not [each for each in wanted if each[2] and each[1] == "glossary.html" and each[2] not in ids[each[1]]]
    assert seen == {"errors": [], "beyond": []}


def test_the_boards_of_the_first_ten_minutes_answer_without_a_kernel(site, page, seen):
    page.context.set_offline(True)
    page.goto((site / "start.html").as_uri())
    page.wait_for_function("document.querySelectorAll('.wb[data-ready]').length === 2")
    chips, board = page.query_selector_all(".wb[data-ready]")
    for view, figure, button, key in ((chips, "data-launches", "[data-key=transformer_block_bucketing]", "Enter"),
                                      (board, "data-exposed", "rect[role=button] >> nth=1", "ArrowLeft")):
        before = view.get_attribute(figure)
        view.query_selector(button).press(key)
        assert view.get_attribute(figure) != before
    assert seen == {"errors": [], "beyond": []}


def test_pages_follow_the_system_and_fit_a_phone(site, page):
    page.set_viewport_size({"width": 400, "height": 850})
    for name in ("index", "start", "usage", *lesson_names()):
        for scheme, dark in (("light", False), ("dark", True)):
            page.emulate_media(color_scheme=scheme)
            page.goto((site / f"{name}.html").as_uri(), wait_until="load")
            assert page.evaluate(WIDE) <= 0, (name, scheme)
            assert (max(page.evaluate(PAPER)) < 100) == dark, (name, scheme)
    page.goto((site / "usage.html").as_uri())
    page.add_style_tag(content="pre { overflow: visible }")
    assert page.evaluate(WIDE) > 0
