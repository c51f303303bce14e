"""What the documents show is what the code says: tables, picture, and the worked diffs."""

import json
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.pipeline.build import check_buildable
from workbench.recipe.recipe import load_recipe, recipe_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```$", CONTRIBUTING, re.DOTALL | re.MULTILINE)


def test_the_tables_are_current() -> None:
    texts = MADE["documents"]()
    stale = [name for name, text in texts.items() if text != (ROOT / name).read_text()]
    assert not stale, "run `python docs/make_tables.py`"
    shown = {place for text in texts.values() for place in MADE["places"](text)}
    assert shown == set(MADE["tables"]()), "a table that no document shows"
    with pytest.raises(SystemExit, match="gone:begin -->: no such table"):
        MADE["with_tables"]("<!-- gone:begin --><!-- gone:end -->", {}, "x.md")


def words(text: str) -> int:
    """How many words a reader sees: no comments, and no marks that are not words."""
    shown = re.sub(r"<!--.*?-->", "", text)
    return sum(bool(re.search(r"\w", word)) for word in shown.split())


def test_the_results_are_one_page() -> None:
    assert words("| a | -- <!-- no word --> b, c |") == 3
    assert words((ROOT / "docs" / "results.md").read_text()) <= 1500


def test_the_first_pages_are_short() -> None:
    assert len(README.splitlines()) <= 120 and len(CONTRIBUTING.splitlines()) <= 150


def test_every_documented_command_is_a_command() -> None:
    from workbench.cli import parser

    (commands,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
    for path in DOCUMENTS:
        for name in re.findall(r"^ +workbench (\w+)", path.read_text(), re.MULTILINE):
            assert name in commands, f"{path.name}: workbench {name}"


def test_a_recipe_is_said_to_need_cuda_where_the_run_is_refused_for_it() -> None:
    for recipe in map(load_recipe, recipe_names()):
        if not (said := MADE["needs_cuda"](recipe)):
            check_buildable(recipe, "gloo")
            continue
        with pytest.raises(WorkbenchError) as refused:
            check_buildable(recipe, "gloo")
        (which,) = re.findall(r"^pass '(\w+)' needs CUDA ", str(refused.value))
        assert f"`{which}`" in said


def anchors(text: str) -> set[str]:
    """The names that a forge, or JupyterLab, gives to a document's headings."""
    heads = re.findall(r"^#+ (?:<.*>)?(.+)$", text, re.MULTILINE)
    return {name for head in heads for name in (anchor(head), head.replace(" ", "-"))}


def anchor(head: str) -> str:
    return re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")


def broken_links(path: Path, text: str, served: Path = ROOT) -> list[str]:
    """The targets of a document's links that name no file below the folder that is served, or no heading of it."""
    found = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve()
        inside = there.exists() and there.is_relative_to(served.resolve())
        if not inside or (anchor and anchor not in anchors(there.read_text() if name else text)):
            found.append(target)
    return found


def test_links_lead_somewhere() -> None:
    served = re.search(r"jupyter lab --notebook-dir=(\S+)", (ROOT / "Makefile").read_text())
    assert served is not None
    broken = {path.name: broken_links(path, path.read_text()) for path in DOCUMENTS}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "markdown"]
        broken[path.name] = broken_links(path, "\n".join("".join(c["source"]) for c in cells), ROOT / served[1])
    assert {name: links for name, links in broken.items() if links} == {}
    text = "# One head\n[a](#one-head) [b](#two) [c](README.md) [d](gone.md) [e](http://x)"
    assert broken_links(ROOT / "x.md", text) == ["#two", "gone.md"]
    beyond = "[f](../docs/glossary.md)"
    assert broken_links(ROOT / "notebooks" / "x", beyond, ROOT / "notebooks") == ["../docs/glossary.md"]


def unused(terms: list[str], texts: str) -> list[str]:
    """The terms that stand in no text, as words or in a link."""
    return [term for term in terms if not re.search(rf"\b{re.escape(term)}|#{anchor(term)}\b", texts, re.IGNORECASE)]


def test_the_glossary_says_each_used_term_in_two_sentences() -> None:
    entries = (ROOT / "docs" / "glossary.md").read_text().split("\n## ")[1:]
    terms = [re.sub("<[^>]*>", "", entry.partition("\n")[0]) for entry in entries]
    counts = {term: len(re.findall(r"[.](?=\s|$)", entry)) for term, entry in zip(terms, entries, strict=True)}
    assert {term: count for term, count in counts.items() if count not in (1, 2)} == {} and len(terms) > 40
    texts = [path.read_text() for path in DOCUMENTS if path.name != "glossary.md"]
    texts += [path.read_text() for path in (*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "workbench").rglob("*.py"))]
    assert unused(terms, "\n".join(texts)) == []
    assert unused(["saved tensors", "level light", "roofline"], "Saved tensors, [light](x#level-light)") == ["roofline"]


def fits(patch: str) -> str:
    """What git says of a patch that does not fit the checkout; nothing is written."""
    done = subprocess.run(["git", "apply", "--check", "-p0", "-"], cwd=ROOT, input=patch, text=True,
                          capture_output=True, check=False)
    return done.stderr


def test_the_worked_diffs_fit_the_code() -> None:
    assert len(DIFFS) == 4
    assert fits("".join(DIFFS)) == ""
    for count, lines in re.findall(r"^@@ -0,0 \+1,(\d+) @@\n((?:\+.*\n)+)", "".join(DIFFS), re.MULTILINE):
        assert len(re.findall(r"^\+(?!\+\+)", lines, re.MULTILINE)) == int(count), lines  # git drops what is too many
    (number,) = set(re.findall(r"lessons/l(\d+)_", "".join(DIFFS)))
    assert list((ROOT / "lessons").glob(f"l{number}_*")) == []
    assert "patch does not apply" in fits("".join(DIFFS).replace('\n     cudagraph', '\n     cudagraf', 1))
