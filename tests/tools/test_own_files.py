"""The user's files: imported once, and refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.passes import registry
from workbench.recipe.contracts import CONTRACTS
from workbench.tools.own_files import import_file

PASS_FILE = """\
from workbench import register_pass

MARK = "seen"


@register_pass("marks", stage="joint", changes="a mark on the first node")
def marks(gm, example_inputs, *, options):
    next(iter(gm.graph.nodes)).meta[MARK] = True
    return gm
"""


@pytest.fixture(autouse=True)
def marks_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_passes", None), CONTRACTS.pop("marks", None), registry._PASSES.pop("marks", None)


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "own_passes.py"
    file.write_text(PASS_FILE)
    import_file(file)
    import_file(file)  # it is there already
    assert CONTRACTS["marks"].source == "user" and sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("own_passes.py", None, "{}: no such file"),
    ("json.py", "", "{}: 'json' cannot be its name as a module, or is another's: rename the file"),
    ("own_passes.py", "x = 1\ny = z\n", "{}, line 2: NameError: name 'z' is not defined"),
    ("own_passes.py", "x = (1\n", "{}: SyntaxError: '(' was never closed (own_passes.py, line 1)"),
])
def test_a_file_that_cannot_be_imported(tmp_path, capsys, name, text, message) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert main(["run", "llama3", "--import", str(file)]) == 2
    assert capsys.readouterr().err == f"workbench: error: {message.format(file)}\n"
