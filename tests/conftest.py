"""Shared pools and builds, groups for two workers, and a table of results for `make test-fast`."""

import gc
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from registrations import registrations_restored

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WORKBENCH_SCORES"] = ""  # scores are the user's
os.environ["WORKBENCH_PROGRESS"] = "0"  # stderr holds what a test looks for
gc.set_threshold(20_000, 20, 10)  # a tenth of a run went into looking for garbage among torch's modules

POOLS = "session pools", "own pools"
FAULT_COLUMNS = ("ranks", "fault", "seconds to report", "orphans", "next call works")
_ROWS: dict[str, dict[str, Any]] = {}
_FAULTS: list[tuple[str, ...]] = []


@pytest.fixture(autouse=True)
def _nothing_registered_stays() -> Iterator[None]:
    with registrations_restored():
        yield


@pytest.fixture(scope="module")
def fake4() -> Iterator[Any]:
    """A fake world of 4 ranks."""
    from workbench.world.fake import fake_world

    with fake_world(4) as world:
        yield world


@pytest.fixture(scope="session")
def tour() -> Any:
    """The tour's recipe with one layer, built on a fake world: no test changes it."""
    from workbench import build, load_recipe
    from workbench.world.fake import fake_world

    recipe = load_recipe("tour").override({"model.n_layers": 1})
    with fake_world(recipe.mesh.world_size) as world:
        return build(recipe, world)


def _session_pool(n: int, backend: str) -> Any:
    """Ranks for all tests that do them no harm: a start costs seconds."""
    @pytest.fixture(scope="session")
    def running() -> Iterator[Any]:
        from workbench.world.ranks import ranks

        with ranks(n, backend=backend, timeout=280, echo="none") as ranks_of_session:
            yield ranks_of_session

    return running


pool2, pool4 = _session_pool(2, "gloo"), _session_pool(4, "gloo")
nccl2, nccl4 = _session_pool(2, "nccl"), _session_pool(4, "nccl")


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Any:
    """The ranks that a test's parameter names."""
    return request.getfixturevalue(request.param)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results-json", default=None, help="write each test's outcome, and the versions, to this file")


def _group(item: pytest.Item) -> str:
    """What one worker of two runs as a whole. The session's pools are one worker's, so that each starts once; files
    that start pools of their own are another's; the rest goes file by file.
    """
    if {"pool", "pool2", "pool4"} & set(getattr(item, "fixturenames", ())):
        return POOLS[0]
    return POOLS[1] if item.get_closest_marker("ranks") else item.path.name


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    groups = {item: _group(item) for item in items}
    for module in {item.module for item in items if hasattr(item, "module")}:  # a notebook's cells have none
        if not hasattr(module, "RANKS_IMPORT_IT"):
            cloudpickle.register_pickle_by_value(module)
    # the longest first: two workers then end together
    items.sort(key=lambda item: (groups[item] not in POOLS, not groups[item].endswith(".ipynb")))
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
        if group in POOLS:
            item.add_marker("ranks")
    needing = {item: next(iter(many.args), 2) if many else 1 for item in items
               if (many := item.get_closest_marker("multi_gpu")) or item.get_closest_marker("gpu")}
    if needing:
        import torch

        have = torch.cuda.device_count()
        for item, need in needing.items():
            if have < need:
                item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA device(s), and this machine has {have}"))


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        head, _, group = report.nodeid.rpartition("@")  # xdist's group
        name = report.nodeid if "]" in group or not head else head
        seconds = round(report.duration, 1)
        _ROWS[name] = {"what": name, "outcome": report.outcome, "seconds": seconds}
    if report.when == "call":
        _FAULTS.extend(value for name, value in report.user_properties if name == "fault_row")


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--results-json")
    if not target or hasattr(session.config, "workerinput"):
        return
    import torch

    outcomes = Counter(row["outcome"] for row in _ROWS.values())
    table = {
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
        "system": platform.system(), "counts": outcomes, "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "rows": sorted(_ROWS.values(), key=itemgetter("what")),
        "faults": [dict(zip(FAULT_COLUMNS, row, strict=True)) for row in _FAULTS],
    }
    Path(target).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
