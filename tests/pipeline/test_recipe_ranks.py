"""A pool that is given is used and left open; one of another size is refused."""

from __future__ import annotations

import sys
import time
from functools import partial

import cloudpickle
import pytest
from on_ranks import small

from workbench import WorkbenchError, run
from workbench.pipeline import run as running
from workbench.pipeline.progress import Post
from workbench.pipeline.recipe_ranks import on_ranks
from workbench.world.mesh import current_world
from workbench.world.ranks import RankPool

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RECIPE = small({"dp_shard": 2}, joint=("reshard_after_forward",)).override({"training.steps": 1})


def late(recipe, post):
    """Rank 1 ends its first step later; the second step changes no start."""
    time.sleep(current_world().rank)
    for step in range(2):
        post.step(step, 0.0)
        time.sleep(0.5)
    return post.start


def test_a_start_counts_on_each_rank_from_the_call_that_asked(pool2):
    ask = partial(on_ranks, RECIPE, pool2, late, timeout=200, progress=False)
    pool2.run(int)  # the first call has the time to join, too
    now, earlier = ask(), ask(began=time.perf_counter() - 100)
    assert [joining for joining, _ in now] == [0, 0] and now[1][1] >= 1 and now[0][1] < 100
    assert all(seconds >= 100 + rank for rank, (_, seconds) in enumerate(earlier))


def test_the_start_is_the_slowest_rank_s_and_no_wait_for_the_last_to_join(monkeypatch):
    monkeypatch.setattr(running, "gathered", lambda start: [start, (2.0, 3.0)])
    post = Post(joining=9.0)
    assert running.start_seconds(post) is None
    post.start = 9.0, 1.0
    assert running.start_seconds(post) == 5.0


@pytest.mark.ranks
def test_one_pool_serves_several_questions(pool2: RankPool) -> None:
    pids = pool2.pids
    report = run(RECIPE, world=pool2, progress=False)
    assert report.ok and report.world["kind"] == "gloo" and report.training is not None
    assert run(RECIPE, world=pool2, progress=False).ok
    assert pool2.pids == pids
    with pytest.raises(WorkbenchError, match=r"needs 4 ranks, and this pool has 2: .* start 4 ranks"):
        run(RECIPE.override({"mesh.dp_shard": 4}), world=pool2)
    assert pool2.pids == pids
