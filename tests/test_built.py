"""`build`: every step in one call, what it refuses before it starts, and that it leaves nothing behind."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest
import torch
from on_ranks import FSDP4, FSDP_TP, small, user_pass
from test_joint_graph import state

from workbench.built import build, check_buildable
from workbench.errors import WorkbenchError
from workbench.numerics_proof import loosest, prove_numerics
from workbench.verify.verdicts import Outcome
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TOUR = ("inductor_decomposition", "activation_checkpointing", "reshard_after_forward"), (
    "transformer_block_bucketing",)


@pytest.fixture(scope="module")
def built(fake4):
    """Two builds on one world, and the process's state around them."""
    before = state(), dict(os.environ)
    first = build(small(FSDP_TP, *TOUR), fake4)
    second = build(small(FSDP_TP, *TOUR), fake4, level="full")
    return first, second, before, (state(), dict(os.environ))


def test_two_builds_in_one_process_leave_it_as_it_was(built):
    first, second, before, after = built
    assert before == after
    ops = [[str(n.target) for n in b.step.pair.forward.graph.nodes] for b in (first, second)]
    assert ops[0] == ops[1]


def test_what_it_tells(built):
    first, second, *_ = built
    assert list(first.seconds) == ["author", "capture", "joint passes", "partition", "passes", "compile"]
    assert {r.outcome for r in first.records} == {Outcome.PASS} and first.pipeline == []
    assert first.saved_bytes > 0 and first.flop > 1e6
    assert first.captured is not first.records[-2].after[0]
    assert repr(first).startswith("Built(small on fake: inductor_decomposition PASS, ")
    # a fake world proves no numerics, and says so
    assert {r.verdict("numerics").outcome for r in second.records} == {Outcome.UNKNOWN}
    assert [v.outcome for v in second.pipeline] == [Outcome.UNKNOWN]


def test_the_loosest_contract_is_that_of_the_list(built):
    first, *_ = built
    assert loosest([]).numerics == "exact"
    assert loosest(first.records).name == "inductor_decomposition"
    assert loosest(first.records[1:]).name == "transformer_block_bucketing"


def test_unknown_passes_are_refused_first():
    with pytest.raises(WorkbenchError, match="unknown pass 'mine': register it with @register_pass"):
        check_buildable(small(FSDP_TP, ("mine",)), "gloo")


def test_a_users_pass_is_held_to_the_rules():
    recipe = small(FSDP_TP, ("mine", "reshard_after_forward"))
    with user_pass("mine", lambda gm: gm, after={"reshard_after_forward"}), pytest.raises(WorkbenchError) as caught:
        check_buildable(recipe, "gloo")
    assert str(caught.value) == ("recipe 'small': pass 'reshard_after_forward' must come before 'mine': swap them")
    with user_pass("mine", lambda gm: gm, needs={"cuda"}):
        with pytest.raises(WorkbenchError, match=r"'mine' needs CUDA \(it runs on a GPU only\), and world gloo has"):
            check_buildable(recipe, "gloo")
        check_buildable(recipe, "fake")  # it shows what stands before
    tp_only = small({"tp": 2}, ("needs_shards",))
    with (user_pass("needs_shards", lambda gm: gm, needs={"fsdp"}),
          pytest.raises(WorkbenchError, match="pass 'needs_shards' needs FSDP: set mesh.dp_shard")):
        check_buildable(tp_only, "gloo")


def test_no_compiler_is_said_before_anything_is_captured(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    recipe = small(FSDP_TP, ("inductor_decomposition",), ("full_inductor_compilation",))
    with pytest.raises(WorkbenchError, match=r"needs a C\+\+ compiler and none was found: install g\+\+"):
        check_buildable(recipe, "gloo")


def test_an_error_leaves_nothing_open(fake4):
    def raises(gm):
        raise ValueError("x")

    before = state()
    for stage in ("joint", "partitioned"):
        with user_pass("raises", raises, stage=stage), pytest.raises(WorkbenchError, match="raised ValueError: x"):
            lists = (("raises",), ()) if stage == "joint" else ((), ("raises",))
            build(small(FSDP_TP, *lists), fake4)
        assert state() == before


def full(recipe):
    found = build(recipe, current_world(), level="full")
    gradients = [p.grad for p in found.authored.module.parameters()]
    return ({r.name: {v.check: str(v.outcome) for v in r.verdicts} for r in found.records},
            [str(v) for v in found.pipeline], str(found.schedule.outcome), all(g is None for g in gradients))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [FSDP4, FSDP_TP], ids=str)
def test_every_verdict_on_real_ranks(pool4, mesh):
    for records, pipeline, schedule, clean in pool4.run(full, small(mesh, *TOUR)):
        assert set(records) == {*TOUR[0], *TOUR[1]} and schedule == "PASS" and clean
        for verdicts in records.values():
            assert set(verdicts) == {"lint", "effect", "collectives", "memory", "numerics"}
            assert set(verdicts.values()) == {"PASS"}
        assert len(pipeline) == 1 and pipeline[0].startswith("numerics: PASS")


@pytest.mark.ranks
def test_at_capture_numerics_are_those_of_the_list(pool4):
    recipe = small(FSDP4, ({"name": "inductor_decomposition", "at": "capture"},))
    records, pipeline, _, _ = pool4.run(full, recipe)[0]
    assert records["inductor_decomposition"]["numerics"] == "UNKNOWN" and pipeline[0].startswith("numerics: PASS")


def without_a_recipe():
    """A module of one's own on dp_shard 4: passes, partition, compile, numerics."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    from workbench.compiled_step import compile_step
    from workbench.forward_backward import partition
    from workbench.joint_graph import capture
    from workbench.parallel.author import author_module
    from workbench.parallel.plans import ParallelPlan
    from workbench.pipeline import prove_partition, run_joint, run_partitioned

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = torch.nn.functional.dropout(torch.relu(layer(x)), 0.5)
            return x.square().mean()

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    torch.manual_seed(0)
    module, x = Net(), torch.randn(4, 16)
    authored = author_module(module, current_world(), mesh, ParallelPlan(units=("layers.*",)), batch=lambda: (x,))
    joint = capture(authored)
    records = run_joint(joint, ["activation_checkpointing", "reshard_after_forward"])
    pair = partition(joint)
    prove_partition(records, pair)
    later, bodies = run_partitioned(pair, ["transformer_block_bucketing"])
    step = compile_step(pair, bodies)
    whole = prove_numerics(records + later, step)
    step(x).backward()
    return ([(r.name, str(r.outcome)) for r in records + later], [str(v) for v in whole],
            all(p.grad is not None for p in module.parameters()))


@pytest.mark.ranks
def test_a_module_of_ones_own_without_a_recipe_with_dropout(pool4):
    for records, whole, trained in pool4.run(without_a_recipe):
        assert {outcome for _, outcome in records} == {"PASS"} and len(records) == 3
        assert whole[0].startswith("numerics: PASS") and trained


@pytest.mark.ranks
@pytest.mark.slow
def test_full_inductor_on_one_tiny_model(pool4):
    recipe = small(FSDP4, ("inductor_decomposition",), ("transformer_block_bucketing", "full_inductor_compilation"))
    tiny = recipe.override({"model.dim": 16, "model.n_heads": 2, "model.n_kv_heads": 1, "model.ffn_dim": 32})
    for records, pipeline, _, _ in pool4.run(full, tiny):
        assert records["full_inductor_compilation"] == {"effect": "PASS", "numerics": "PASS"}
        assert pipeline[0].startswith("numerics: PASS")
