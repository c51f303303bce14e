"""Names that rooms export load on first use, and each of them is there."""

from importlib import import_module

import pytest

PACKAGES = ["workbench", *(f"workbench.{room}" for room in (
    "authoring", "checks", "graph", "notebook", "pipeline", "recipe", "tools"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_is_there(package: str) -> None:
    module = import_module(package)
    assert dir(module) == module.__all__ and module.__all__
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_another_name_is_refused_with_the_package(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no name 'nothing'"):
        _ = import_module(package).nothing
