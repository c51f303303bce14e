"""More ranks than a machine can hold are refused before one is started, whichever way they are asked for."""

from __future__ import annotations

import os
import resource
import time

import pytest

from workbench import WorkbenchError, compare_schedules, load_recipe, ranks, run
from workbench.world import bounds
from workbench.world.rank_processes import RankProcesses
from workbench.world.ranks import resolve


@pytest.fixture
def none_starts(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(RankProcesses, "_start", started)


@pytest.mark.parametrize("ask", [
    lambda n: ranks(n), lambda n: ranks(n, backend="gloo"), lambda n: resolve("auto", n),  # as %%ranks asks
    lambda n: run(load_recipe("tour").override({"mesh.dp_shard": n // 4}), world="gloo", progress=False)])
def test_millions_of_ranks_are_refused_at_once_with_the_way_out(none_starts, ask):
    start = time.monotonic()
    with pytest.raises(WorkbenchError) as caught:
        ask(39_999_996)
    assert time.monotonic() - start < 10
    assert str(caught.value).startswith("ranks(n=39999996): this machine can start ")
    assert str(caught.value).endswith("take a fake world (--world fake, fake_world(n)), which has up to "
                                      "2,097,152 ranks in one process.")


def test_many_ranks_on_few_cores_are_allowed(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    bounds.refuse_too_many(8)
    bounds.refuse_too_many(bounds.RANKS_A_CORE)
    with pytest.raises(WorkbenchError, match=r"can start 32 ranks at most \(32 for each of 1 core\)"):
        bounds.refuse_too_many(bounds.RANKS_A_CORE + 1)


def test_memory_bounds_them(monkeypatch):
    monkeypatch.setattr(bounds, "_memory", lambda: 10 * bounds.RANK_BYTES + 1)
    bounds.refuse_too_many(10)
    with pytest.raises(WorkbenchError, match=r"at most \(144 MiB for each, and 1,440 MiB are free\)"):
        bounds.refuse_too_many(11)


def test_a_container_bounds_them(monkeypatch, tmp_path):
    monkeypatch.setattr(bounds, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "pids.max").write_text("max\n")
    bounds.refuse_too_many(8)
    (tmp_path / "memory.max").write_text(f"{4 * bounds.RANK_BYTES}\n")
    with pytest.raises(WorkbenchError, match=r"can start 4 ranks at most \(144 MiB for each, and 576 MiB are free\)"):
        bounds.refuse_too_many(8)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "pids.max").write_text("40\n")
    with pytest.raises(WorkbenchError, match=r"5 ranks at most \(8 threads for each, and the container's pids"):
        bounds.refuse_too_many(8)


@pytest.mark.parametrize(("limit", "said"), [("RLIMIT_NOFILE", "4 open files for each, and ulimit -n is 50, with "),
                                             ("RLIMIT_NPROC", "8 threads for each, and ulimit -u is 50")])
def test_the_users_limits_bound_them(monkeypatch, limit, said):
    true = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda what: (50, 50) if what == getattr(resource, limit) else
                        true(what))
    with pytest.raises(WorkbenchError) as caught:
        bounds.refuse_too_many(16)
    assert said in str(caught.value)


@pytest.mark.parametrize("ask", [lambda recipe: run(recipe, world="fake", progress=False), compare_schedules])
def test_a_fake_world_that_no_process_can_lay_out_is_refused_at_once(ask):
    start = time.monotonic()
    with pytest.raises(WorkbenchError, match=r"4,000,000 ranks are more than the 2,097,152 that one process can lay"):
        ask(load_recipe("tour").override({"mesh.dp_shard": 1_000_000}))
    assert time.monotonic() - start < 10
