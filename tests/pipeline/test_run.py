"""`run` on real ranks: a user's own pass is shipped, each rank is heard, and figures are measured."""

from __future__ import annotations

import pytest

from workbench.checks.verdicts import Outcome
from workbench.passes.registry import register_pass
from workbench.pipeline.report import Report
from workbench.pipeline.run import run
from workbench.recipe.recipe import load_recipe
from workbench.world.ranks import RankPool

pytestmark = pytest.mark.ranks
SMALL = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 2, "model.n_layers": 1, "training.steps": 3})


def mine(pool: RankPool, name: str, change) -> Report:
    """A run of a pass that this test registers, as a notebook's cell would."""

    @register_pass(name, stage="joint", numerics="exact")
    def own(gm, example_inputs, *, options):
        return change(gm)

    return run(SMALL.override({"joint_passes": [name]}), world=pool, level="full", progress=False)


def test_a_users_own_pass_gets_every_verdict_and_a_planted_no_op_shows(pool2: RankPool) -> None:
    report = mine(pool2, "does_nothing", lambda gm: gm)
    row = report.pass_row("does_nothing")
    assert row.verdict("effect").outcome is Outcome.NO_EFFECT
    assert report.idle == [("does_nothing", row.verdict("effect").message)]
    assert {row.verdict(c).outcome for c in ("lint", "collectives", "numerics")} == {Outcome.PASS}
    assert row.memory[0] == row.memory[1]
    assert report.ok and report.roofline.ceiling and report.roofline.ceiling > 1e8
    assert report.training is not None and len(report.training.losses) == 3
    assert {v.check: v.outcome for v in report.pipeline} == {"numerics": Outcome.PASS}


def _rounded_on_rank_1(gm):
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        found = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        scaled = next(n for n in found if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].is_floating_point())
        with gm.graph.inserting_after(scaled):
            more = gm.graph.call_function(torch.ops.aten.mul.Tensor, (scaled, 1.5))
        more.meta = dict(scaled.meta)
        scaled.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    return gm


def test_a_fault_on_one_rank_is_shown_with_its_rank(pool2: RankPool) -> None:
    report = mine(pool2, "wrong_on_one", _rounded_on_rank_1)
    assert not report.ok
    assert report.pass_row("wrong_on_one").verdict("numerics").message.startswith("rank ")
    assert "FAIL" in report.table()
