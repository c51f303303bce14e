"""A pool that is given is used and left open; one of another size is refused."""

from __future__ import annotations

import sys
import time

import cloudpickle
import pytest
from on_ranks import small

from workbench import WorkbenchError, bisect, ranks, run
from workbench.pipeline.recipe_ranks import on_ranks
from workbench.world.mesh import current_world

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
    first, second = on_ranks(RECIPE, pool2, late, stages=1, timeout=60, progress=False,
                             began=time.perf_counter() - 5)[1]
    assert second - first > 0.5 and first >= 5 and second >= 6
    assert min(on_ranks(RECIPE, pool2, late, stages=1, timeout=60, progress=False)[1]) < 5


@pytest.mark.ranks
def test_one_pool_serves_several_questions() -> None:
    with ranks(2, timeout=300, echo="none") as pool:
        pids = pool.pids
        report = run(RECIPE, world=pool, progress=False)
        assert report.ok and report.world["kind"] == "gloo" and report.training is not None
        assert bisect(RECIPE, world=pool, progress=False).found is None
        assert pool.pids == pids
        with pytest.raises(WorkbenchError, match=r"needs 4 ranks, and this pool has 2: .* start ranks\(4\)"):
            run(RECIPE.override({"mesh.dp_shard": 4}), world=pool)
        assert pool.pids == pids
