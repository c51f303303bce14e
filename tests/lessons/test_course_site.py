"""`workbench course --site DIR`: what it refuses, and what its pages say. tests/browser walks all of them."""

import re

import pytest

from workbench import WorkbenchError
from workbench.__main__ import main
from workbench_lessons.course.course_site import documents, write_site
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.course.scores import SCORES

NAME, NEXT = "12_inside_inductor", "13_find_the_wrong_pass"


def test_a_folder_that_is_not_its_own_stays_as_it_is(tmp_path):
    kept = tmp_path / "thesis" / "chapter.html"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(WorkbenchError, match=r"--site .*thesis: exists and is no site of this course: give a new"):
        write_site([NAME], kept.parent)
    assert [each.name for each in kept.parent.iterdir()] == ["chapter.html"] and kept.read_text() == "mine"
    with pytest.raises(WorkbenchError, match=r"--site .*chapter.html: exists and is no site"):
        write_site([NAME], kept)


def test_a_missing_notebook_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_NOTEBOOKS", str(tmp_path))
    with pytest.raises(WorkbenchError, match=rf"{NAME}.ipynb: no such notebook"):
        write_site([NAME], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_site_has_progress_and_leads_from_one_lesson_to_the_next(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SCORES, str(tmp_path / "scores.json"))
    out = tmp_path / "site"
    assert main(["course", "12", "13", "--site", str(out)]) == 0
    assert f"site: {out}/index.html" in capsys.readouterr().out
    assert {path.stem for path in out.glob("*.html")} == {"index", *(path.stem for path in documents()), NAME, NEXT}
    pages = [(out / f"{name}.html").read_text() for name in (NAME, NEXT)]
    first, second = (page.partition("<nav>")[2].partition("</nav>")[0] for page in pages)
    assert f'<a href="{NEXT}.html">Next: ' in first and "Before: " not in first
    assert f'<a href="{NAME}.html">Before: ' in second and "Next: " not in second
    count = len(load_lesson(NAME).checkpoints)
    assert f"<td>0 of {count}</td>" in (out / "index.html").read_text()
    page = pages[0]
    assert 'href="glossary.html#' in page and "glossary.md#" not in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?:', page)
    links = re.findall(r'<a[^>]* href="([^"#]*)', page)
    assert links and not [each for each in links if each and ":" not in each and not (out / each).is_file()]
