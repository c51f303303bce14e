"""The package's names load on first use, and each of them is there."""

import pytest

import workbench


def test_each_name_is_there() -> None:
    assert dir(workbench) == workbench.__all__ and len(workbench.__all__) > 50
    assert [name for name in workbench.__all__ if not hasattr(workbench, name)] == []


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'workbench' has no name 'nothing'"):
        _ = workbench.nothing


def test_a_name_of_the_last_release_says_what_stands_in_its_place() -> None:
    for name in workbench._GONE:
        with pytest.raises(AttributeError, match=rf"workbench\.{name} is gone: \w+"):
            getattr(workbench, name)
