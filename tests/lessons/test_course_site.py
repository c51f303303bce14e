"""`workbench course --site DIR`: what it refuses, and what its pages say. tests/browser walks all of them."""

import re
from pathlib import Path

import pytest

from workbench import WorkbenchError
from workbench.__main__ import main
from workbench_lessons.course.course_site import documents, write_site

ROOT = Path(__file__).parents[2]
NAME, NEXT = "12_inside_inductor", "13_find_the_wrong_pass"


def test_a_folder_that_is_not_its_own_stays_as_it_is(tmp_path):
    kept = tmp_path / "thesis" / "chapter.html"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(WorkbenchError, match=r"--site .*thesis: exists and is no site of this course: give a new"):
        write_site([NAME], kept.parent)
    assert [each.name for each in kept.parent.iterdir()] == ["chapter.html"] and kept.read_text() == "mine"


def test_a_missing_notebook_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_NOTEBOOKS", str(tmp_path))
    with pytest.raises(WorkbenchError, match=rf"{NAME}.ipynb: no such notebook"):
        write_site([NAME], tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_site_leads_from_one_lesson_to_the_next(tmp_path, capsys):
    out = tmp_path / "site"
    assert main(["course", "12", "13", "--site", str(out)]) == 0
    assert f"site: {out}/index.html" in capsys.readouterr().out
    documented = {path.stem for path in documents()}
    assert {path.stem for path in out.glob("*.html")} == {"index", "start", *documented, NAME, NEXT}
    page, following, start = ((out / f"{name}.html").read_text() for name in (NAME, NEXT, "start"))
    assert page.count(f'href="{NEXT}.html"><small>Next: </small>13 ') == 2  # above and below
    assert page.count('href="start.html"><small>Before: ') == 2
    assert f'href="{NAME}.html"><small>Before: </small>12 ' in following and "<small>Next: " not in following
    assert 'href="glossary.html#' in page and "glossary.md#" not in page
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?:', page)
    links = re.findall(r'<a[^>]* href="([^"#]*)', page)
    assert links and not [each for each in links if each and ":" not in each and not (out / each).is_file()]
    marks = (ROOT / "lessons/course/start.md").read_text().count("<!--")
    assert start.count('class="jp-Cell jp-CodeCell') == marks == 5, "give the id of the cell as it is called now"
    assert "jp-Notebook-cell jp-mod-noOutputs" not in start and 'class=" highlight hl-' not in start  # outputs alone
    assert 'href="000_own_program.html"' not in start  # a lesson that this site does not have
    models = re.findall(r'"model_id": "([0-9a-f]{32})"', start)
    assert len(models) == len(set(models)) == 2  # the pass chips and the board, alive
