"""Groups for two workers, GPU tests skipped without GPUs, and a table of results for `make test-fast`."""

import gc
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from registrations import registrations_restored

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WORKBENCH_SCORES"] = ""  # scores are the user's
os.environ["WORKBENCH_PROGRESS"] = "0"  # stderr holds what a test looks for
gc.set_threshold(20_000, 20, 10)  # a tenth of a run went into looking for garbage among torch's modules

_RESULTS: dict[str, str] = {}
_SECONDS: dict[str, float] = {}
_FAULTS: list[tuple[str, ...]] = []
_TARGET: list[str] = []
FAULT_COLUMNS = ("ranks", "fault", "seconds to report", "orphans", "next call works")


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


def _ranks(n: int, backend: str) -> Iterator[Any]:
    from workbench.world.ranks import ranks

    with ranks(n, backend=backend, timeout=280, echo="none") as pool:
        yield pool


@pytest.fixture(scope="session")
def pool2() -> Iterator[Any]:
    """Two gloo ranks for all tests that do them no harm: a start costs seconds."""
    yield from _ranks(2, "gloo")


@pytest.fixture(scope="session")
def pool4() -> Iterator[Any]:
    """Four gloo ranks, likewise."""
    yield from _ranks(4, "gloo")


@pytest.fixture(scope="session")
def nccl2() -> Iterator[Any]:
    """Two GPUs, likewise."""
    yield from _ranks(2, "nccl")


@pytest.fixture(scope="session")
def nccl4() -> Iterator[Any]:
    """Four GPUs, likewise."""
    yield from _ranks(4, "nccl")


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Any:
    """The ranks that a test's parameter names: `whole_steps.gloo_and_nccl`."""
    return request.getfixturevalue(request.param)


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--results-json")
    if target and not hasattr(config, "workerinput"):
        _TARGET.append(target)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results-json", default=None, help="write each test's outcome, and the versions, to this file")


POOLS = "session pools", "own pools"


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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The rows that tests/world/test_fault_matrix.py recorded, as a table."""
    if _FAULTS:
        terminalreporter.section("faults on ranks")
        for row in [FAULT_COLUMNS, *_FAULTS]:
            terminalreporter.write_line("{:<8}{:<48}{:>18}{:>9}{:>17}".format(*row))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        head, _, group = report.nodeid.rpartition("@")  # xdist's group
        name = report.nodeid if "]" in group or not head else head
        _RESULTS[name] = report.outcome
        _SECONDS[name] = round(report.duration, 1)
    if report.when == "call":
        _FAULTS.extend(value for name, value in report.user_properties if name == "fault_row")


def pytest_runtest_logfinish() -> None:
    """Nothing is lost of a run that is cut off."""
    if _TARGET:
        write_results(_TARGET[0])


def write_results(target: str) -> None:
    import torch

    outcomes = list(_RESULTS.values())
    table = {
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
        "system": platform.system(), "counts": {o: outcomes.count(o) for o in sorted(set(outcomes))},
        "cores": os.cpu_count(), "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "rows": [{"what": name, "outcome": outcome, "seconds": _SECONDS[name]}
                 for name, outcome in sorted(_RESULTS.items())],
        "faults": [dict(zip(FAULT_COLUMNS, row, strict=True)) for row in _FAULTS],
    }
    Path(target).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
