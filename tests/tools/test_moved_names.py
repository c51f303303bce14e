"""An old path says where it has gone, and a path that never was is refused as Python refuses it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from workbench.tools.moved_names import _FOLDERS, _RENAMED


@pytest.mark.parametrize(("old", "new"), [
    ("joint_graph", "graph.capture"), ("verify", "checks"), ("matrix", "tools.matrix"),
    ("graph.read.census", "graph.read.nodes"), ("torch_api.regions", "torch_api.inductor.regions")])
def test_an_old_path_says_where_it_has_gone(old: str, new: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"workbench\.{old} is workbench\.{new} now"):
        import_module(f"workbench.{old}")


@pytest.mark.parametrize("new", [*_RENAMED.values(), *_FOLDERS.values()])
def test_each_new_path_is_there(new: str) -> None:
    assert find_spec(f"workbench.{new}") is not None


def test_a_folder_that_moved_is_told_before_what_was_in_it() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"workbench\.analysis is workbench\.graph\.read now"):
        import_module("workbench.analysis.census")


def test_what_never_was_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'workbench\.nothing'$"):
        import_module("workbench.nothing")


def test_the_documented_paths_are_kept() -> None:
    assert import_module("workbench.world.worker").main and import_module("workbench.passes.registry").register_pass
