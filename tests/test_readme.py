"""What the documents show is what the code says: tables, picture, and the worked diffs."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_tables_are_current() -> None:
    texts = MADE["documents"]()
    stale = [name for name, text in texts.items() if text != (ROOT / name).read_text()]
    assert not stale, "run `python docs/make_tables.py`"
    shown = {place for text in texts.values() for place in MADE["places"](text)}
    assert shown == set(MADE["tables"]()), "a table that no document shows"
    with pytest.raises(SystemExit, match="gone:begin -->: no such table"):
        MADE["with_tables"]("<!-- gone:begin --><!-- gone:end -->", {}, "x.md")


def test_the_first_pages_and_the_results_are_short() -> None:
    assert len(README.splitlines()) <= 120 and len(CONTRIBUTING.splitlines()) <= 150
    usage = (ROOT / "docs" / "usage.md").read_text().split("\n## ")
    assert {part.partition("\n")[0]: n for part in usage if (n := len(part.splitlines())) > 60} == {}  # a screen
    results = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / "results.md").read_text())
    assert len(re.findall(r"\S*\w\S*", results)) <= 1500  # words, without marks that are none


def anchors(text: str) -> set[str]:
    """The names that a forge, or JupyterLab, gives to a document's headings."""
    heads = re.findall(r"^#+ (?:<.*>)?(.+)$", text, re.MULTILINE)
    forge = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return forge | {head.replace(" ", "-") for head in heads}


def broken_links(path: Path, text: str) -> list[str]:
    """The targets of a document's links that name no file of the checkout, or no heading of it."""
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve()
        inside = there.exists() and there.is_relative_to(ROOT.resolve())
        if not inside or (anchor and anchor not in anchors(there.read_text() if name else text)):
            found.append(target)
    return found


def test_links_lead_somewhere() -> None:
    broken = {path.name: broken_links(path, path.read_text()) for path in DOCUMENTS}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "markdown"]
        broken[path.name] = broken_links(path, "\n".join("".join(c["source"]) for c in cells))
    assert {name: links for name, links in broken.items() if links} == {}
    text = "# One head\n[a](#one-head) [b](#two) [c](README.md) [d](gone.md) [e](http://x) [f](../)"
    assert broken_links(ROOT / "x.md", text) == ["#two", "gone.md", "../"]


def misfit(patch: str) -> str:
    """What git says of a patch that does not fit the checkout; nothing is written."""
    command = ["git", "apply", "--check", "-p0", "-"]
    return subprocess.run(command, cwd=ROOT, input=patch, text=True, capture_output=True).stderr


def test_the_worked_diffs_fit_the_code() -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)
    patch = "".join(diffs)
    assert len(diffs) == 4 and misfit(patch) == ""
    for count, lines in re.findall(r"^@@ -0,0 \+1,(\d+) @@\n((?:\+.*\n)+)", patch, re.MULTILINE):
        assert len(re.findall(r"^\+(?!\+\+)", lines, re.MULTILINE)) == int(count), lines  # git drops what is too many
    (number,) = set(re.findall(r"lessons/l(\d+)_", patch))
    assert list((ROOT / "lessons").glob(f"l{number}_*")) == []
    assert "patch does not apply" in misfit(patch.replace("\n     cudagraph", "\n     cudagraf", 1))
