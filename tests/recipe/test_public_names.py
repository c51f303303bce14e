"""Packages whose public names load on use: each name is there, and another one is refused."""

from importlib import import_module

import pytest

NAMES = {"artifacts": "compile_recipe run_artifact", "bisect": "Bisection bisect", "traces": "read_order",
         "compile_backend": "as_backend", "graph_passes": "as_graph_pass", "schedule": "compare_schedules",
         "inside_inductor": "Explanation inductor_passes look_inside watched"}


def test_the_names_of_a_folder_of_the_lab_are_there() -> None:
    for folder, names in NAMES.items():
        package = import_module(f"workbench.lab.{folder}")
        assert [name for name in names.split() if not hasattr(package, name)] == [], folder
        with pytest.raises(AttributeError, match=f"'workbench.lab.{folder}' has no name 'nothing'"):
            _ = package.nothing
