"""The course as pages that need no kernel and no network: nbconvert's, with links from one to the next."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.recipe.files import write_whole
from workbench_lessons.course.headless import notebooks_dir, page_of
from workbench_lessons.course.lesson import Lesson, load_lesson
from workbench_lessons.course.scores import load_scores, score_of

MARK = "workbench-site"
"""A file of this name says that a folder is a site, which may be written again."""
DOCS = ("glossary", "results", "usage", "design")
STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 1em auto; padding: 0 1em; color: #222; background: #fff }
nav a { margin-right: 1.2em }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .3em .8em; vertical-align: top; text-align: left; border-top: 1px solid #ddd }
pre { white-space: pre-wrap }
.anchor-link { display: none }
img { max-width: 100% }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } a { color: #8cf } }
"""


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
    notebooks = [notebooks_dir() / f"{name}.ipynb" for name in names]
    for path in notebooks:
        if not path.is_file():
            raise WorkbenchError(
                f"{path}: no such notebook: set WORKBENCH_NOTEBOOKS to their folder"
            )
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()
    pages = {"index", *(path.stem for path in documents()), *names}
    for number, path in enumerate(notebooks):
        tell(path.stem)
        page = _without_network(page_of(path))
        page = re.sub(r"(<body[^>]*>)", rf"\1{_navigation(lessons, number)}", page, count=1)
        write_whole(out / f"{path.stem}.html", _local(page, pages))
    for path in documents():
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        write_whole(out / f"{path.stem}.html", _page(title, _local(_html_of(text), pages)))
    write_whole(out / "index.html", _index(lessons))
    return out / "index.html"


def documents() -> list[Path]:
    """The documents that the site shows: those that its index lists, and the pages of measurements."""
    docs = notebooks_dir().parent / "docs"
    return [*(docs / f"{name}.md" for name in DOCS), *sorted((docs / "measurements").glob("*.md"))]


def _page(title: str, body: str) -> str:
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style>{_links((('Contents', 'index'),))}{body}</html>\n"
    )


def _links(targets: Iterable[tuple[str, str]]) -> str:
    links = [f'<a href="{name}.html">{html.escape(title)}</a>' for title, name in targets]
    return f"<nav>{''.join(links)}</nav>"


def _navigation(lessons: Sequence[Lesson], number: int) -> str:
    """Contents, the lesson before and the lesson after."""
    targets = [("Contents", "index")]
    if number > 0:
        targets.append((f"Before: {lessons[number - 1].title}", lessons[number - 1].name))
    if number + 1 < len(lessons):
        targets.append((f"Next: {lessons[number + 1].title}", lessons[number + 1].name))
    return _links(targets)


def _without_network(page: str) -> str:
    """Without the scripts that nbconvert's page would fetch: the views draw themselves."""
    page = re.sub(r'<script[^>]*\ssrc="https?:[^>]*>\s*</script>', "", page)
    return re.sub(
        r"<script>(?:(?!</script>).)*?addWidgetsRenderer.*?</script>", "", page, flags=re.DOTALL
    )


def _local(page: str, pages: set[str]) -> str:
    """Links to notebooks and documents lead to their pages; links to other files of the repository become text."""
    def address(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        name, _, kind = target.rpartition("/")[2].rpartition(".")
        if kind not in ("md", "ipynb", "html") or name not in pages:
            return ""
        return f' href="{name}.html{"#" * bool(anchor)}{anchor}"'

    return re.sub(r'(?<=<a) href="([^"]*)"', address, page)


def _html_of(markdown: str) -> str:
    """With headings under the names by which links on GitHub know them."""
    from nbconvert.filters import markdown2html

    def heading(match: re.Match[str]) -> str:
        level, text = match[1], match[2]
        plain = html.unescape(re.sub("<[^>]*>", "", text)).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        return f'<h{level} id="{name}">{text}</h{level}>'

    body = markdown2html(re.sub('<a id="[^"]*"></a>', "", markdown))  # these are for JupyterLab
    return re.sub(
        r'<h(\d) id="[^"]*">(.*?)(?:<a class="anchor-link"[^>]*>.*?</a>)?</h\1>', heading, body
    )


def _index(lessons: Sequence[Lesson]) -> str:
    scores, rows = load_scores(), []
    for lesson in lessons:
        points = [score_of(scores, lesson.name, point.name) for point in lesson.checkpoints]
        passed = f"{sum(score >= 1 for score in points)} of {len(points)}"
        link = f'<a href="{lesson.name}.html">{html.escape(lesson.title)}</a>'
        rows.append((link, html.escape(lesson.question), f"{lesson.minutes}&nbsp;minutes", passed))
    documents = _links((name.capitalize(), name) for name in DOCS)
    columns = ("lesson", "question", "time", "checkpoints passed")
    return page_of_rows("The course", columns, rows, documents)


def page_of_rows(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], below: str = ""
) -> str:
    """A page with one table; cells are HTML."""
    heads = "".join(f"<th>{column}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return _page(title, f"<h1>{title}</h1><table><tr>{heads}</tr>{''.join(lines)}</table>{below}")
