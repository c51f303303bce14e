"""`workbench course --site DIR`: what it refuses, and what its pages say. tests/browser walks all of them."""

from __future__ import annotations

import html
import re

import pytest

from workbench import WorkbenchError
from workbench.__main__ import main
from workbench.notebook.lessons.course_site import DOCS, PAGES, _museum, write_site
from workbench.notebook.lessons.lesson import lesson_file, lesson_names, load_lesson
from workbench.notebook.lessons.scores import SCORES, keep_score

NAME = "12_inside_inductor"


def test_a_folder_that_is_not_its_own_stays_as_it_is(tmp_path):
    kept = tmp_path / "thesis" / "chapter.html"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(WorkbenchError, match=r"--site .*thesis: exists and is no site of this course: give a new"):
        write_site([NAME], kept.parent)
    assert [each.name for each in kept.parent.iterdir()] == ["chapter.html"] and kept.read_text() == "mine"
    with pytest.raises(WorkbenchError, match=r"--site .*chapter.html: exists and is no site"):
        write_site([NAME], kept)
    with pytest.raises(WorkbenchError, match=r"--site .*: cannot be written: Not a directory"):
        write_site([NAME], kept / "below")


def test_a_missing_notebook_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_NOTEBOOKS", str(tmp_path))
    with pytest.raises(WorkbenchError, match=rf"{NAME}.ipynb: no such notebook"):
        write_site([NAME], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_site_has_progress_and_can_be_written_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SCORES, str(tmp_path / "scores.json"))
    out = tmp_path / "site"
    assert main(["course", "12", "--site", str(out)]) == 0
    assert f"site: {out}/index.html" in capsys.readouterr().out
    assert {path.stem for path in out.glob("*.html")} == {*PAGES, *DOCS, NAME}
    count = len(load_lesson(NAME).checkpoints)
    assert f"<td>0 of {count}</td>" in (out / "index.html").read_text()
    keep_score(NAME, load_lesson(NAME).checkpoints[0].name, 1.0)
    assert main(["course", "12", "--site", str(out)]) == 0
    assert f"<td>1 of {count}</td>" in (out / "index.html").read_text()
    page = (out / f"{NAME}.html").read_text()
    assert 'href="glossary.html#' in page and "glossary.md#" not in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?:', page)
    links = re.findall(r'<a[^>]* href="([^"#]*)', page)
    assert links and not [each for each in links if each and ":" not in each and not (out / each).is_file()]


def test_the_museum_is_a_path_of_cells_that_reproduce_and_checks_that_would_have_caught_it(tmp_path, monkeypatch):
    monkeypatch.setenv(SCORES, str(tmp_path / "scores.json"))
    lessons = [load_lesson(name) for name in lesson_names()]
    page = _museum(lessons)
    shown = [(lesson, each) for lesson in lessons for each in lesson.museum]
    sections = page.split("<h2 ")[1:]
    assert len(sections) == len(shown) >= 8
    for number, ((lesson, each), section) in enumerate(zip(shown, sections, strict=True), 1):
        assert f">{number} of {len(shown)}: " in section and f'href="{lesson.name}.html' in section
        cell = html.unescape(re.search(r"<h3>Reproduce</h3>.*?<pre>(.+?)</pre>", section, re.DOTALL)[1])
        assert len(cell.splitlines()) > 1 and html.escape(each.verdict) in section
        assert f"<summary>What would have caught it</summary><p>{html.escape(each.caught)}</p>" in section


def test_an_exhibit_without_what_would_have_caught_it_is_refused(tmp_path):
    path = lesson_file("03_split_forward_and_backward")
    kept = [line for line in path.read_text().splitlines() if not line.startswith("caught = ")]
    (tmp_path / path.name).write_text("\n".join(kept))
    with pytest.raises(WorkbenchError, match=r"museum\[0\]\.caught: Field required"):
        load_lesson(tmp_path / path.name)
