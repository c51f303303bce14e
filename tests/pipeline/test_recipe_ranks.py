"""A pool that is given is used and left open; one of another size is refused."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from on_ranks import small

from workbench import WorkbenchError, run
from workbench.world.ranks import RankPool

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RECIPE = small({"dp_shard": 2}, joint=("reshard_after_forward",)).override({"training.steps": 1})


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
