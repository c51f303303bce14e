"""The course as pages that need no kernel and no network: lessons, glossary, museum, results and a search."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.notebook.lessons.headless import notebooks_dir, page_of
from workbench.notebook.lessons.lesson import Lesson, load_lesson
from workbench.notebook.lessons.scores import Scores, load_scores
from workbench.recipe.files import write_whole

MARK = "workbench-site"
"""A file of this name says that a folder is a site, which may be written again."""
DOCS = {"glossary": "Glossary", "results": "Results", "usage": "Usage", "design": "Design"}
PAGES = {"index": "Course", "glossary": "Glossary", "museum": "Museum", "results": "Results", "search": "Search"}
STYLE = ("body{font:16px/1.5 sans-serif;max-width:60em;margin:1em auto;padding:0 1em;color:#222;background:#fff}"
         "nav a{margin-right:1.2em}td,th{padding:.3em .8em;vertical-align:top;text-align:left}"
         "td{border-top:1px solid #ddd}table{border-collapse:collapse}pre{white-space:pre-wrap}"
         ".anchor-link{display:none}img{max-width:100%}"
         "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}a{color:#8cf}}")
SEARCH = """
const words = document.querySelector("input"), found = document.querySelector("ul");
words.addEventListener("input", () => {
  const wanted = words.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const hits = wanted.length ? TEXTS.filter(([title, , text]) =>
    wanted.every((word) => `${title} ${text}`.toLowerCase().includes(word))) : [];
  found.replaceChildren(...hits.slice(0, 50).map(([title, page, text]) => {
    const item = document.createElement("li"), link = document.createElement("a");
    const at = Math.max(0, text.toLowerCase().indexOf(wanted[0]) - 60);
    Object.assign(link, { href: page, textContent: title });
    item.append(link, ` ${text.slice(at, at + 180)}`);
    return item;
  }));
});"""
Text = tuple[str, str, str]
"""Of a section: its title, its address, and its words."""


def write_site(names: Sequence[str], out: Path, tell: Callable[[str], None] = lambda _: None) -> Path:
    """Write a page for each of these lessons, as their notebooks were executed, and the pages around them.

    WorkbenchError for a folder with other files in it, which is left as it is.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARK).is_file())):
        raise WorkbenchError(f"--site {out}: exists and is no site of this course: give a new folder")
    lessons = [load_lesson(name) for name in names]
    for each in lessons:
        if not (path := notebooks_dir() / f"{each.name}.ipynb").is_file():
            raise WorkbenchError(f"{path}: no such notebook: run from a checkout, or set WORKBENCH_NOTEBOOKS")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
    except OSError as error:
        raise WorkbenchError(f"--site {out}: cannot be written: {error.strerror}") from None
    pages = {*PAGES, *DOCS, *(each.name for each in lessons)}
    texts: list[Text] = []
    for each in lessons:
        tell(each.name)
        path = notebooks_dir() / f"{each.name}.ipynb"
        write_whole(out / f"{each.name}.html", _lesson_page(path, pages))
        texts += [(f"{each.title}: {title}", f"{each.name}.html#{title.replace(' ', '-')}", text)
                  for title, text in _sections(_markdown(path))]
    for name, title in DOCS.items():
        path = notebooks_dir().parent / "docs" / f"{name}.md"
        source = re.sub('<a id="[^"]*"></a>', "", path.read_text(encoding="utf-8"))  # for JupyterLab
        body = _local(_anchored(_html_of(source)), pages)
        for image in set(re.findall(r'<img[^>]* src="([\w.-]+)"', body)):
            write_whole(out / image, (path.parent / image).read_bytes())
        _write(out / f"{name}.html", title, body)
        texts += [(head, f"{name}.html#{_slug(head)}", text) for head, text in _sections(source)]
    _write(out / "museum.html", "Museum", _museum(lessons))
    data = json.dumps(texts).replace("<", "\\u003c")  # no text ends the script
    _write(out / "search.html", "Search", "<h1>Search</h1><input aria-label='words' autofocus size=40><ul></ul>"
           f"<script>const TEXTS = {data};{SEARCH}</script>")
    _write(out / "index.html", "Course", _index(lessons, load_scores()))
    return out / "index.html"


def _write(path: Path, title: str, body: str) -> None:
    write_whole(path, f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
                    f"<style>{STYLE}</style>{_nav()}{body}</html>\n")


def _nav() -> str:
    links = "".join(f'<a href="{name}.html">{title}</a>' for name, title in PAGES.items())
    return f"<nav>{links}</nav>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    head = "".join(f"<th>{each}</th>" for each in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _lesson_page(path: Path, pages: set[str]) -> str:
    """What nbconvert writes, without the scripts that it would fetch; the views draw themselves."""
    page = re.sub(r'<script[^>]*\ssrc="https?:[^>]*>\s*</script>', "", page_of(path))
    page = re.sub(r"<script>(?:(?!</script>).)*?addWidgetsRenderer.*?</script>", "", page, flags=re.DOTALL)
    page = re.sub(r"(<body[^>]*>)", rf"\1{_nav()}", page, count=1)
    return _local(page, pages)


def _local(page: str, pages: set[str]) -> str:
    """Links to notebooks and documents lead to their pages; links to other files of the repository become text."""
    def one(match: re.Match[str]) -> str:
        address, _, anchor = match[1].partition("#")
        if not address or re.match(r"\w+:", address):
            return match[0]
        name, _, kind = address.rpartition("/")[2].rpartition(".")
        if kind not in ("md", "ipynb", "html") or name not in pages:
            return ""
        return f' href="{name}.html{"#" * bool(anchor)}{anchor}"'

    return re.sub(r'(?<=<a) href="([^"]*)"', one, page)


def _html_of(markdown: str) -> str:
    from nbconvert.filters import markdown2html

    return str(markdown2html(markdown))


def _anchored(body: str) -> str:
    """Headings under the names that links to them use."""
    return re.sub(r'<h(\d) id="[^"]*">(.*?)(<a class="anchor-link"[^>]*>.*?</a>)?</h\1>',
                  lambda m: f'<h{m[1]} id="{_slug(re.sub("<[^>]*>", "", m[2]))}">{m[2]}</h{m[1]}>', body)


def _slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", html.unescape(title).replace("`", "").lower()).strip().replace(" ", "-")


def _markdown(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _sections(markdown: str) -> Iterator[tuple[str, str]]:
    """(heading, words) of each section, without the addresses of its links."""
    plain = re.sub(r"\]\([^)]*\)", "]", markdown)
    for part in re.split(r"^#+ ", plain, flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        yield head.replace("`", "").strip(), re.sub(r"[\[\]*`|]", "", " ".join(text.split()))


def _link(lesson: Lesson) -> str:
    return f'<a href="{lesson.name}.html">{html.escape(lesson.title)}</a>'


def _museum(lessons: Sequence[Lesson]) -> str:
    """A path through the exhibits: each with the cell that reproduces it, and what would have caught it."""
    shown = [(lesson, each) for lesson in lessons for each in lesson.museum]
    parts = ["<h1>Museum of bugs</h1><p>Real bugs, each in the smallest graph that has it. Say of each which check "
             "would have found it, before you open the answer. Then reproduce it in its lesson.</p>"]
    for number, (lesson, each) in enumerate(shown, 1):
        name, bug, seen, verdict, caught, cell = map(html.escape, (
            each.name, each.bug, each.seen, each.verdict, each.caught, _cell(lesson, each.name)))
        parts.append(f'<h2 id="{name}">{number} of {len(shown)}: {name.replace("_", " ")}</h2><p>{bug}</p>'
                     f"<p>Seen in: {seen}</p><h3>Reproduce</h3><p>In {_link(lesson)}:</p><pre>{cell}</pre>"
                     f"<p>It prints: <code>{verdict}</code></p>"
                     f"<details><summary>What would have caught it</summary><p>{caught}</p></details>")
    return "\n".join(parts)


def _cell(lesson: Lesson, exhibit: str) -> str:
    """The source of the cell that reproduces an exhibit; "" where the notebook has none."""
    cells = json.loads((notebooks_dir() / f"{lesson.name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return next(("".join(cell["source"]) for cell in cells
                 if cell["metadata"].get("tags", [])[:2] == ["museum", exhibit]), "")


def _index(lessons: Sequence[Lesson], scores: Scores) -> str:
    rows, passed, count = [], 0, 0
    for lesson in lessons:
        best = [scores.get(lesson.name, {}).get(point.name, {}).get("score", 0.0) for point in lesson.checkpoints]
        done = sum(score >= 1 for score in best)
        passed, count = passed + done, count + len(best)
        rows.append([_link(lesson), html.escape(lesson.question), f"{lesson.minutes}&nbsp;minutes",
                     f"{done} of {len(best)}"])
    return (f"<h1>The course</h1><p>{passed} of {count} checkpoints passed when this page was written.</p>"
            + _table(("lesson", "question", "time", "passed"), rows))
