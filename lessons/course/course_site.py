"""The course as pages that need no kernel and no network: nbconvert's, with links from one to the next."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.files import write_whole
from workbench_lessons.course.headless import exported, notebooks_dir, page_of
from workbench_lessons.course.lesson import Lesson, load_lesson

MARK = "workbench-site"
"""A file of this name says that a folder is a site, which may be written again."""
DOCS = ("glossary", "results", "usage", "design")
HERE = Path(__file__).parent
STYLE = (HERE / "site.css").read_text(encoding="utf-8")
STATE = "application/vnd.jupyter.widget-state+json"
START = "The first ten minutes"


def write_site(
    names: Sequence[str], out: Path, tell: Callable[[str], None] = lambda _: None
) -> Path:
    """Write a page for each of these lessons, as their notebooks were executed, the documents, and an index.

    WorkbenchError for a folder with other files in it, which is left as it is.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file())):
        raise WorkbenchError(
            f"--site {out}: exists and is no site of this course: give a new folder"
        )
    lessons = [load_lesson(name) for name in names]
    for name in names:
        if not (path := notebooks_dir() / f"{name}.ipynb").is_file():
            raise WorkbenchError(
                f"{path}: no such notebook: set WORKBENCH_NOTEBOOKS to their folder"
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    titles = {"start": START}
    titles |= {lesson.name: f"{lesson.name.partition('_')[0]} {lesson.title}" for lesson in lessons}
    pages = {"index", *titles, *(path.stem for path in documents())}
    for name in titles:
        tell(name)
        page = _start() if name == "start" else page_of(notebooks_dir() / f"{name}.ipynb")
        write_whole(out / f"{name}.html", _local(_framed(page, _bar(titles, name)), pages))
    for path in documents():
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        write_whole(out / f"{path.stem}.html", _page(title, _bar({}, "") + _local(_html_of(text), pages)))
    write_whole(out / "index.html", _index(lessons, titles))
    return out / "index.html"


def documents() -> list[Path]:
    """The documents that the site shows: those that its index lists, and the pages of measurements."""
    docs = notebooks_dir().parent / "docs"
    return [*(docs / f"{name}.md" for name in DOCS), *sorted((docs / "measurements").glob("*.md"))]


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>{body}</html>\n"
    )


def _framed(page: str, bar: str) -> str:
    """nbconvert's page with the bar above and below, in the site's style, and without a network."""
    page = _without_network(page).replace("</head>", f"<style>{STYLE}</style></head>", 1)
    return page.replace("<main>", f"{bar}<main>", 1).replace("</main>", f"</main>{bar}", 1)


def _bar(titles: dict[str, str], name: str) -> str:
    """Links to the contents, and to the pages before and after this one, which come in the order of the titles."""
    names = [*titles]
    at = names.index(name) if name else 0
    bar = '<nav class="bar">'
    for kind, links in (("before", names[:at][-1:]), ("contents", ["index"]), ("next", names[at + 1 : at + 2])):
        for link in links:
            title = html.escape(titles.get(link, "The course"))
            bar += f'<a class="{kind}" href="{link}.html"><small>{kind.capitalize()}: </small>{title}</a>'
    return f"{bar}</nav>"


def _start() -> str:
    """start.md as a page. Each comment in it, a lesson and the id of a cell, becomes that cell's recorded outputs."""
    cells: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    marks = re.findall("(.*?)<!-- (.+?): (.+?) -->", (HERE / "start.md").read_text(encoding="utf-8"), re.DOTALL)
    for i, (text, name, cell_id) in enumerate(marks):
        recorded = (notebooks_dir() / f"{name}.ipynb").read_text(encoding="utf-8")
        # the widgets of each notebook are called 0...0, 0...1
        notebook = json.loads(re.sub(r"(?<![0-9a-f])0(?=[0-9a-f]{31}\b)", f"{i:x}", recorded))
        cells.append({"cell_type": "markdown", "id": f"text-{i}", "metadata": {}, "source": text})
        cells += [cell for cell in notebook["cells"] if cell["id"] == cell_id]
        models |= notebook["metadata"].get("widgets", {}).get(STATE, {"state": {}})["state"]
    page = {"cells": cells, "metadata": {"widgets": {STATE: {"state": models}}}, "nbformat": 4, "nbformat_minor": 5}
    return exported(json.dumps(page), START, exclude_input=True, exclude_output_prompt=True)


def _without_network(page: str) -> str:
    """Without the scripts that nbconvert's page would fetch: the views draw themselves."""
    page = re.sub(r'<script[^>]*\ssrc="https?:[^>]*>\s*</script>', "", page)
    return re.sub(
        r"<script>(?:(?!</script>).)*?addWidgetsRenderer.*?</script>", "", page, flags=re.DOTALL
    )


def _local(page: str, pages: set[str]) -> str:
    """Links to notebooks and documents lead to their pages; links to other files of the repository become text."""
    def address(match: re.Match[str]) -> str:
        name, anchor = match.groups(default="")
        return f' href="{name}.html{anchor}"' * (name in pages)

    return re.sub(r'(?<=<a) href="(?!\w+:|#|")[^"#]*?([^"#/]*?)(?:\.(?:md|ipynb|html))?(#[^"]*)?"', address, page)


def _html_of(markdown: str) -> str:
    """With headings under the names by which links on GitHub know them."""
    from nbconvert.filters import markdown2html

    def known(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"[^\w-]", "", html.unescape(match[2]).lower())

    body = markdown2html(re.sub('<a id="[^"]*"></a>', "", markdown))  # these are for JupyterLab
    return re.sub(r'(<h\d id="|class="anchor-link" href="#)([^"]*)', known, body)


def _index(lessons: Sequence[Lesson], titles: dict[str, str]) -> str:
    rows = []
    for lesson in lessons:
        link = f'<a href="{lesson.name}.html">{html.escape(titles[lesson.name])}</a>'
        rows.append((link, html.escape(lesson.question), f"{lesson.minutes}&nbsp;minutes"))
    links = "".join(f'<a href="{name}.html">{name.capitalize()}</a>' for name in DOCS)
    above = (
        f'<p><b>New here?</b> <a href="start.html">{START}</a>: nothing to install, and boards to play with.</p>'
        f'<nav class="list">{links}</nav>'
    )
    return page_of_rows("The course", ("lesson", "question", "time"), rows, above)


def page_of_rows(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], above: str = ""
) -> str:
    """A page with one table; cells are HTML."""
    heads = "".join(f"<th>{column}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    table = f'<table class="rows"><tr>{heads}</tr>{"".join(lines)}</table>'
    return _page(title, f"<h1>{title}</h1>{above}{table}")
