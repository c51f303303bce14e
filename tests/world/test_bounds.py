"""More ranks than a machine can hold are refused before one is started, whichever way they are asked for."""

import os
import time

from workbench import WorkbenchError, compare_schedules, load_recipe, ranks, run
from workbench.world import bounds
from workbench.world.rank_processes import RankProcesses


def refused(ask, *given):
    """What a call is refused with, or nothing."""
    try:
        ask(*given)
    except WorkbenchError as error:
        return str(error)
    return ""


def test_millions_of_ranks_are_refused_at_once_with_the_way_out(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(RankProcesses, "_start", started)
    start = time.monotonic()
    millions = load_recipe("tour").override({"mesh.dp_shard": 39_999_996 // 4})
    for ask in (lambda: ranks(39_999_996, backend="gloo"),
                lambda: run(millions, world="gloo", progress=False)):
        said = refused(ask)
        assert said.startswith("ranks(n=39999996): this machine can start "), said
        assert said.endswith("take a fake world (--world fake, fake_world(n)), which has up to 2,097,152 ranks in one "
                             "process."), said
    for ask in (lambda: run(millions, world="fake", progress=False),
                lambda: compare_schedules(millions)):
        assert "39,999,996 ranks are more than the 2,097,152 that one process can lay" in refused(ask)
    assert time.monotonic() - start < 20


def test_cores_and_free_memory_bound_them(monkeypatch):
    with monkeypatch.context() as one_core:
        one_core.setattr(os, "sched_getaffinity", lambda _: {0})
        assert refused(bounds.refuse_too_many, bounds.RANKS_A_CORE) == ""  # many ranks on few cores are allowed
        assert "can start 32 ranks at most (32 for each of 1 core)" in refused(bounds.refuse_too_many, 33)
    monkeypatch.setattr(bounds, "_memory", lambda: 10 * bounds.RANK_BYTES + 1)
    assert refused(bounds.refuse_too_many, 10) == ""
    assert "at most (144 MiB for each, and 1,440 MiB are free)" in refused(bounds.refuse_too_many, 11)


def test_a_containers_memory_bounds_them(monkeypatch, tmp_path):
    monkeypatch.setattr(bounds, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert refused(bounds.refuse_too_many, 8) == ""
    (tmp_path / "memory.max").write_text(f"{4 * bounds.RANK_BYTES}\n")
    assert "4 ranks at most (144 MiB for each, and 576 MiB are free)" in refused(bounds.refuse_too_many, 8)
