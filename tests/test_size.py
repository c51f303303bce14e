"""How much there is to read: tokens, density, and what one import reaches. A figure may fall, and never rise."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable

import networkx as nx
import pytest
from imports import FILES, PACKAGE, graph_of_imports

CORE = [text for name, text in FILES.items() if name.split(".")[0] not in ("lab", "notebook")]
COURSE = [path.read_text() for path in sorted((PACKAGE.parent / "lessons/course").glob("*.py"))]
MOST = {"tokens": 240_000, "tokens of the core": 150_000, "tokens a line": 10, "share of long lines": 0.03}
MOST_OF_THE_COURSE = 14_000
"""Tokens of lessons/course, which was a part of the package until it had 239,496."""
REACH = {"graph.capture": (40, 5_000), "pipeline.build": (80, 10_000), "passes.graph_cleanup": (7, 1_020),
         "passes.activation_checkpointing": (15, 2_085), "passes.transformer_block_bucketing": (20, 2_650)}
"""Files and lines. Aims: 40 and 5,000; 80 and 10,000; 20 files for a core pass."""
_NO_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def read(source: str) -> tuple[int, int, int]:
    """(tokens, code lines, code lines of more than 100 columns); docstrings and comments do not count."""
    alone = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    texts = {node.lineno for node in alone if isinstance(getattr(node.value, "value", None), str)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
              if token.type not in _NO_TOKENS and not (token.type == tokenize.STRING and token.start[0] in texts)]
    lines = {number for token in tokens for number in range(token.start[0], token.end[0] + 1)}
    columns = source.splitlines()
    return len(tokens), len(lines), sum(len(columns[number - 1]) > 100 for number in lines)


def figures(sources: Iterable[str], core: Iterable[str]) -> dict[str, float]:
    tokens, lines, long = (sum(column) for column in zip(*map(read, sources), strict=True))
    return {"tokens": tokens, "tokens of the core": sum(read(text)[0] for text in core),
            "tokens a line": tokens / lines, "share of long lines": long / lines}


def test_the_package_does_not_grow() -> None:
    found = figures(FILES.values(), CORE)
    assert {name: value for name, value in found.items() if value > MOST[name]} == {}


def test_what_left_the_package_for_the_course_does_not_grow_there() -> None:
    assert 10_000 < sum(read(text)[0] for text in COURSE) <= MOST_OF_THE_COURSE


@pytest.mark.parametrize("name", REACH)
def test_an_import_reaches_no_more_than_it_did(name: str) -> None:
    files, lines = REACH[name]
    names = nx.descendants(graph_of_imports(), name) | {name}
    assert len(names) <= files and sum(len(FILES[each].splitlines()) for each in names) <= lines, sorted(names)


def test_a_longer_and_a_denser_text_are_seen() -> None:
    text = '"""A docstring."""\n\n# a comment\nx = 1\n\n\ndef f(a):\n    return a + x\n'
    assert read(text) == (3 + 6 + 4, 3, 0)
    assert read(text + f"y = {'x + ' * 30}x\n")[1:] == (4, 1)
    assert figures([text], [])["tokens a line"] < figures([text.replace("a + x", "a + x + x")], [])["tokens a line"]


def test_the_core_is_read_in_an_afternoon() -> None:
    """docs/design.md lists its files in reading order, and their lines to a tenth."""
    text = (PACKAGE.parent / "docs/design.md").read_text()
    listed = re.findall(r"^\| \[([\w/]+)\.py\]\(\S+\) \| (\d+) \|", text, re.MULTILINE)
    lines = {name: len(FILES[name.replace("/", ".")].splitlines()) for name, _ in listed}
    assert 10 < len(listed) <= 18 and sum(lines.values()) <= 2_500
    assert {name: told for name, told in listed if abs(int(told) - lines[name]) > lines[name] / 10} == {}
