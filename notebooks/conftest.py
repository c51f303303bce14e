"""Committed outputs are compared: the kernels that nbval starts draw no progress bars."""

import os

KERNELS = {"WORKBENCH_PROGRESS": "0", "WORKBENCH_SCORES": ""}  # the reader's own scores are not ours to write
kept = {}


def pytest_runtest_setup(item):  # type: ignore[no-untyped-def]
    """Here a notebook's kernel starts; other tests of the run keep their environment."""
    kept.update({name: os.environ.get(name) for name in KERNELS})
    os.environ.update(KERNELS)


def pytest_runtest_teardown(item):  # type: ignore[no-untyped-def]
    os.environ.update({name: value for name, value in kept.items() if value is not None})
    for name in (name for name, value in kept.items() if value is None):
        os.environ.pop(name, None)
