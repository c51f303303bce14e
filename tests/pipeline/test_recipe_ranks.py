"""A pool that is given is used and left open; one of another size is refused."""

from __future__ import annotations

import pytest
from on_ranks import small

from workbench import WorkbenchError, bisect, ranks, run

RECIPE = small({"dp_shard": 2}, joint=("reshard_after_forward",)).override({"training.steps": 1})


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
