"""What a fingerprint sees of code, and what it must not take for a change."""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
from fractions import Fraction

import pytest
import torch

from workbench.tools.fingerprint import fingerprint

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
    ("depth = 2", "depth = 3"),
    ("make(2)", "make(3)"),  # what it closes over
    ("offset=0", "offset=1"),
    ("class Model(Base)", "class Model(object)"),
    ("* factor", "/ factor"),
    ("self.shift(x)", "self.other(x)"),  # an attribute
    ("helper(self", "torch.ops.aten.neg.default(self"),
    ("    return x + 1", "    return torch.ops.aten.mm.default(x, x)"),
    ("    return x - 1", "    return max(x)"),  # what Python has built in
    ("import torch\n", "import torch\n\n"),  # the lines in a captured graph
], ids=str)
def test_a_change_is_seen(was, now):
    assert was in CELL and fingerprint(loaded()) != fingerprint(loaded(CELL.replace(was, now)))


@pytest.mark.parametrize(("was", "now"), [
    ("x.alpha()", "x.beta()"), ("sum(x)", "max(x)"),
    ("torch.ops.aten.mm.default(x)", "torch.ops.aten.bmm.default(x)"),
])
def test_a_name_that_is_no_global_is_seen(was, now):
    one, other = (loaded(f"import torch\ndef chosen(x):\n    return {text}\n") for text in (was, now))
    assert fingerprint(one) != fingerprint(other)


def test_an_exception_that_is_caught_is_seen():
    one, other = (loaded(f"def chosen(x):\n    try:\n        return x()\n    except {name}:\n        return 0\n")
                  for name in ("KeyError", "ValueError"))
    assert fingerprint(one) != fingerprint(other)


def test_a_set_of_functions_that_refer_to_it_ends():
    source = "CALLS = set()\ndef chosen():\n    return CALLS, {}\nCALLS.add(chosen)\n"
    assert fingerprint(loaded(source.format(1))) == fingerprint(loaded(source.format(1)))
    assert fingerprint(loaded(source.format(1))) != fingerprint(loaded(source.format(2)))


def test_what_it_does_not_name_is_no_change():
    assert fingerprint(loaded()) == fingerprint(loaded(CELL + "\nother = 5\ndef idle():\n    return other\n"))


def test_a_patched_function_of_a_module_is_seen(monkeypatch):
    from workbench.passes import transformer_block_bucketing as transform
    from workbench.torch_api.inductor import bucketing as schedulers

    before = fingerprint(transform.transformer_block_bucketing)
    monkeypatch.setattr(schedulers, "twin_group", lambda name: name)
    assert fingerprint(transform.transformer_block_bucketing) != before
    monkeypatch.undo()
    assert fingerprint(transform.transformer_block_bucketing) == before


def test_an_import_inside_a_function_is_followed(monkeypatch):
    module = types.ModuleType("own_module_of_a_test")
    exec("def called(x):\n    return x", module.__dict__)
    monkeypatch.setitem(sys.modules, "own_module_of_a_test", module)

    def function(x):
        from own_module_of_a_test import called

        return called(x)

    before = fingerprint(function)
    exec("def called(x):\n    return -x", module.__dict__)
    assert fingerprint(function) != before


def test_a_relative_import_and_a_module_in_a_module_are_followed(monkeypatch):
    package, inner = types.ModuleType("own_package"), types.ModuleType("own_package.inner")
    package.inner, package.__path__ = inner, []
    for module in (package, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    space = {"__name__": "own_package.outer", "__package__": "own_package", "own_package": package}
    exec("def relative(x):\n    from .inner import called\n    return called(x)\n"
         "def dotted(x):\n    return own_package.inner.called(x)\n", space)
    for name in ("relative", "dotted"):
        exec("def called(x):\n    return x", inner.__dict__)
        before = fingerprint(space[name])
        exec("def called(x):\n    return -x", inner.__dict__)
        assert fingerprint(space[name]) != before, name


def test_a_module_that_cannot_be_imported_here_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "own_broken_module.py").write_text("raise RuntimeError('needs a GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert fingerprint(loaded("def chosen():\n    import own_broken_module\n"))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Otherwise(enum.Enum):
    RED = 2


Otherwise.__qualname__ = "Colour"


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Holder:
    def __init__(self, value):
        self.value = value
        self.me = self  # a cycle ends


def kind(value):
    return type(value).__name__  # an address differs between the workers that collect


@pytest.mark.parametrize(("a", "b"), [
    (1, True), (1, 1.0), ("a", b"a"), ([1], (1,)), ({1: 2}, {1: 3}), (Colour.RED, Colour.BLUE), ([1, 2], [[1], 2]),
    (torch.float32, torch.float64), (torch.ops.aten.mm, torch.ops.aten.bmm), (Holder(1), Holder(2)),
    (functools.partial(max, 1), functools.partial(max, 2)), (torch.ones(1), torch.ones(1)), (len, max),
    (Slotted(1), Slotted(2)), (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)), (Colour.RED, Otherwise.RED),
    (Fraction(1, 2), Fraction(1, 4)), (torch.contiguous_format, torch.channels_last), (object(), object()),
    (operator.itemgetter(0), operator.itemgetter(1)),
], ids=kind)
def test_data_differ(a, b):
    assert fingerprint(a) != fingerprint(b) and fingerprint(a) == fingerprint(a)


@pytest.mark.parametrize(("a", "b"), [
    ({1, 2, 3}, {3, 2, 1}), (Holder([1]), Holder([1])), (functools.partial(max, 1), functools.partial(max, 1)),
    (torch.ops.aten.mm.default, torch.ops.aten.mm.default), (Slotted(1), Slotted(1)),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)), (Fraction(1, 2), Fraction(1, 2)),
], ids=kind)
def test_data_are_the_same(a, b):
    assert fingerprint(a) == fingerprint(b)


def test_an_object_of_a_library_is_told_from_the_next_at_its_address():
    found = set()
    for _ in range(20):
        found.add(fingerprint(torch.empty(1)))
    assert len(found) == 20


def test_what_python_writes_later_is_no_change():
    import copy

    from workbench.torch_api.aot import Contexts

    before = fingerprint(Contexts)
    copy.copy(Holder(1)), copy.copy(Contexts())  # writes __slotnames__ into the class
    assert fingerprint(Contexts) == before


def test_libraries_count_by_name():
    code = fingerprint(torch.nn.Linear)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "extra_repr", lambda self: "")
        assert fingerprint(torch.nn.Linear) == code
