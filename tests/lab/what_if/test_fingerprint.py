"""What a fingerprint sees of code, and what it must not take for a change."""

import enum
import functools
import importlib
import os
import threading

import torch

from workbench.lab.what_if.fingerprint import Sources, fingerprint

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


CHANGES = [
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
]


def test_a_change_is_seen_and_what_it_does_not_name_is_none():
    was = fingerprint(loaded())
    same = [(old, new) for old, new in CHANGES if fingerprint(loaded(CELL.replace(old, new))) == was]
    assert same == [] and all(old in CELL for old, _ in CHANGES)
    assert fingerprint(loaded(CELL + "\nother = 5\ndef idle():\n    return other\n")) == was


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Holder:
    def __init__(self, value):
        self.value = value
        self.me = self  # a cycle ends


DIFFERENT = [
    (1, True), ("a", b"a"), ([1], (1,)), ({1: 2}, {1: 3}), (Colour.RED, Colour.BLUE), ([1, 2], [[1], 2]),
    (torch.float32, torch.float64), (torch.ops.aten.mm, torch.ops.aten.bmm), (Holder(1), Holder(2)),
    (functools.partial(max, 1), functools.partial(max, 2)), (torch.ones(1), torch.ones(1)), (len, max),
]


def test_data_differ_or_are_the_same():
    for a, b in DIFFERENT:
        assert fingerprint(a) != fingerprint(b) and fingerprint(a) == fingerprint(a)
    for a, b in [({1, 2, 3}, {3, 2, 1}), (Holder([1]), Holder([1])),
                 (functools.partial(max, 1), functools.partial(max, 1))]:
        assert fingerprint(a) == fingerprint(b)
    held = threading.Lock()  # what cannot be pickled is unlike everything
    assert fingerprint(held) != fingerprint(held)


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
