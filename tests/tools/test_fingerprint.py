"""What a fingerprint sees of code, and what it must not take for a change."""

from __future__ import annotations

import enum
import functools
import importlib
import os
import threading

import pytest
import torch

from workbench.tools.fingerprint import Sources, fingerprint

CELL = """
import torch
LIMIT = 3
def helper(x):
    return x + 1
class Base:
    def shift(self, x):
        return x - 1
class Model(Base):
    depth = 2
    def forward(self, x):
        return helper(self.shift(x)) * LIMIT
def make(factor):
    def inner(x, offset=0):
        return Model().forward(x) * factor + offset
    return inner
chosen = make(2)
"""


def loaded(source=CELL):
    """`chosen` of a cell that was run in a namespace of its own."""
    space = {"__name__": "__main__"}
    exec(compile(source, "cell", "exec"), space)
    return space["chosen"]


def test_the_same_cell_run_twice_is_the_same():
    assert fingerprint(loaded()) == fingerprint(loaded())


@pytest.mark.parametrize(("was", "now"), [
    ("x + 1", "x + 2"),  # a function that a method names
    ("x - 1", "x - 2"),  # an inherited method
    ("LIMIT = 3", "LIMIT = 4"),
    ("make(2)", "make(3)"),  # what it closes over
    ("offset=0", "offset=1"),
    ("class Model(Base)", "class Model(object)"),
    ("* factor", "/ factor"),
    ("self.shift(x)", "self.other(x)"),  # an attribute
    ("helper(self", "torch.ops.aten.neg.default(self"),
    ("    return x + 1", "    return torch.ops.aten.mm.default(x, x)"),
    ("    return x - 1", "    return max(x)"),  # what Python has built in
    ("import torch\n", "import torch\n\n"),  # the lines in a captured graph
    ("helper(self.shift(x))", "helper(self.shift(x).alpha())"),
], ids=str)
def test_a_change_is_seen(was, now):
    assert was in CELL and fingerprint(loaded()) != fingerprint(loaded(CELL.replace(was, now)))


def test_what_it_does_not_name_is_no_change():
    assert fingerprint(loaded()) == fingerprint(loaded(CELL + "\nother = 5\ndef idle():\n    return other\n"))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Holder:
    def __init__(self, value):
        self.value = value
        self.me = self  # a cycle ends


@pytest.mark.parametrize(("a", "b"), [
    (1, True), ("a", b"a"), ([1], (1,)), ({1: 2}, {1: 3}), (Colour.RED, Colour.BLUE), ([1, 2], [[1], 2]),
    (torch.float32, torch.float64), (torch.ops.aten.mm, torch.ops.aten.bmm), (Holder(1), Holder(2)),
    (functools.partial(max, 1), functools.partial(max, 2)), (torch.ones(1), torch.ones(1)), (len, max),
], ids=lambda value: type(value).__name__)  # an address differs between the workers that collect
def test_data_differ(a, b):
    assert fingerprint(a) != fingerprint(b) and fingerprint(a) == fingerprint(a)


@pytest.mark.parametrize(("a", "b"), [
    ({1, 2, 3}, {3, 2, 1}), (Holder([1]), Holder([1])), (functools.partial(max, 1), functools.partial(max, 1)),
    (torch.ops.aten.mm.default, torch.ops.aten.mm.default),
], ids=lambda value: type(value).__name__)
def test_data_are_the_same(a, b):
    assert fingerprint(a) == fingerprint(b)


def test_an_edit_of_a_loaded_file_is_noticed_and_a_new_module_is_none(tmp_path, monkeypatch):
    file = tmp_path / "own_module_of_a_test.py"
    file.write_text("LIMIT = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sources = Sources()
    before = sources.look()
    importlib.import_module("own_module_of_a_test")
    assert sources.look() == before
    os.utime(file, (1, 1))
    assert sources.look() == sources.look() == before + 1


def test_what_cannot_be_pickled_is_unlike_everything():
    held = threading.Lock()
    assert fingerprint(held) != fingerprint(held)
