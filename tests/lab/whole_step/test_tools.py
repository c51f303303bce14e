"""The tools that walk the route, on a recipe whose step is one graph."""

from __future__ import annotations

import pytest
from on_ranks import small

from workbench import as_backend, compare_schedules, what_if
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.integration
BLOCKS = "transformer_block_bucketing"


def recipe(**changes):
    return small({"dp_shard": 2, "tp": 2}, (), (BLOCKS,)).override({"training.step": "whole", **changes})


@pytest.mark.nightly
def test_a_schedule_has_the_norm_s_reduction_too():
    pair, whole = (compare_schedules(recipe(**{"training.step": step}), [0, 1]).verdict for step in ("pair", "whole"))
    assert pair.outcome == whole.outcome == "PASS"
    assert whole.evidence["collectives"] == pair.evidence["collectives"] + 1


def test_a_study_changes_the_step_and_captures_again_only_where_it_must(fake4):
    study = what_if(recipe(**{"training.step": "pair"}), fake4)
    joined = study.change({"training.step": "whole", "passes": [BLOCKS, "fused_clip_adamw"]})
    ran = list(joined.ran)
    assert "author" not in ran and ran[-2:] == ["join", "fused_clip_adamw"]
    again = study.change({"training.clip": None})
    assert list(again.ran) == ["join", "fused_clip_adamw"]
    assert study.records[-1].verdict("effect").outcome == "NO_EFFECT"
    study.revert()
    assert study.records[-1].verdict("effect").outcome == "PASS"


def test_torch_compile_has_no_whole_step():
    with pytest.raises(WorkbenchError, match="'fused_clip_adamw' runs on the step stage, and as_backend"):
        as_backend(["fused_clip_adamw"])
