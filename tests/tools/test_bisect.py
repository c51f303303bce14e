"""`bisect` without ranks: every verdict of level light counts, and a graph that no stage can take is its finding."""

from __future__ import annotations

import pytest
from faults import GATHER, dropped_wait, lost_output, out_of_order, without_metadata
from on_ranks import FSDP_TP, calls, small, user_pass

from workbench import bisect

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("fault", [
    without_metadata, *(pytest.param(each, marks=pytest.mark.nightly) for each in (lost_output, out_of_order))])
def test_bisect_finds_the_pass_whose_graph_no_stage_can_take(fault):
    with user_pass("bad", fault) as name:
        found = bisect(small(FSDP_TP).override({"joint_passes": ["reshard_after_forward", name]}), world="fake",
                       progress=False)
    assert not found.ok and found.found.record == "bad" and found.found.problem.startswith("lint FAIL: ")
    assert repr(found).splitlines()[-1] == "covered: lint, effect, collectives"
    assert found.to_dict()["covered"] == ("lint", "effect", "collectives")


@pytest.mark.nightly
def test_bisect_covers_every_verdict_and_says_so():
    def half(gm):
        gather = calls(gm, GATHER)[0]
        gather.meta["val"] = gather.meta["val"][: gather.meta["val"].shape[0] // 2]
        return gm

    for fault, problem in ((dropped_wait, "lint FAIL: "), (half, "FAIL: "), (lambda gm: gm, "NO_EFFECT: ")):
        with user_pass("bad", fault) as name:
            found = bisect(small(FSDP_TP).override({"joint_passes": [name]}), world="fake", progress=False)
        assert found.found.record == "bad" and problem in found.found.problem
    sound = bisect(small(FSDP_TP).override({"joint_passes": ["reshard_after_forward"]}), world="fake", progress=False)
    assert sound.ok and "nothing found: no verdict fails, and every pass had its effect" in repr(sound)
