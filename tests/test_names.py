"""The package's names load on first use, and each of them is there; a variable's name says what it holds."""

import ast

import pytest
from imports import FILES

import workbench

VAGUE = {"found", "given", "own", "made", "each", "held", "told"}
"""What a name of the field, such as `matches`, `inputs` or `launches`, tells better."""


def test_each_name_is_there_and_another_is_refused() -> None:
    assert dir(workbench) == workbench.__all__ and len(workbench.__all__) > 50
    assert [name for name in workbench.__all__ if not hasattr(workbench, name)] == []
    with pytest.raises(AttributeError, match="module 'workbench' has no name 'nothing'"):
        _ = workbench.nothing


def test_a_name_of_the_last_release_says_what_stands_in_its_place() -> None:
    for name in workbench._GONE:
        with pytest.raises(AttributeError, match=rf"workbench\.{name} is gone: \w+"):
            getattr(workbench, name)


def vague_names(source: str) -> list[str]:
    """The functions, parameters and variables of a module that have one of these names; not the fields of classes."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = [line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign)]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            names.append(node.id)
    return [name for name in names if name in VAGUE]


def test_a_variable_is_named_by_what_it_holds() -> None:
    assert {name: vague for name, source in FILES.items() if (vague := vague_names(source))} == {}


def test_a_vague_name_is_seen() -> None:
    for source, name in (
            ("def f(given): return 1", "given"), ("lambda own: 1", "own"),
            ("def f():\n    def told(): return 1", "told"), ("if made := f(): pass", "made"),
            ("g = [each for each in x]", "each"), ("with x as held: pass", "held"),
            ("class C:\n    def f(self):\n        found: int = 1", "found")):
        assert vague_names(source) == [name]
        assert vague_names(source.replace(name, "nodes")) == []
    assert vague_names("class C:\n    found: int") == []
