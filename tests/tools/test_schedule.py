"""The schedules of all ranks, compared on fake worlds: roles, seeded faults, source lines, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from faults import swap_on_rank_1
from on_ranks import FSDP_TP, small, user_pass

from workbench import author, fake_world, load_recipe
from workbench.checks.verdicts import Outcome
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.tools.schedule import compare_schedules, roles_of
from workbench.torch_api.distributed.dtensor import local_shape

pytestmark = pytest.mark.integration
UNEVEN = {"model.vocab_size": 257, "model.n_layers": 1}


@pytest.mark.parametrize("recipe", [
    small({"dp_shard": 3, "tp": 2}).override(UNEVEN),
    load_recipe("deepseek_v3").override({"mesh.dp_shard": 6, "mesh.tp": 1, "mesh.ep": 2, "model.vocab_size": 257}),
], ids=["tp", "experts on a mesh of their own"])
def test_roles_are_what_the_shards_of_each_rank_say(recipe):
    held = {}
    for rank in range(6):
        with fake_world(6, rank) as world:
            authored = author(recipe, world)
            held[rank] = tuple(tuple(p.to_local().shape) for p in authored.module.parameters())
    with fake_world(6) as world:
        roles = roles_of(author(recipe, world))
    assert len(roles) == len(set(held.values())) > 1 and sum(roles.values()) == 6
    assert [held[rank] for rank in roles] == list(dict.fromkeys(held.values()))


def test_local_shapes_need_no_mesh():
    from torch.distributed.tensor import Replicate, Shard

    assert local_shape((10, 4), (4, 2), (3, 1), (Shard(0), Shard(1))) == (1, 2)
    assert local_shape((9, 4), (4, 2), (3, 1), (Shard(0), Replicate())) == (0, 4)


@pytest.mark.nightly
def test_an_even_mesh_has_one_role_and_its_first_and_last_rank_agree():
    found = compare_schedules(small(FSDP_TP, (), ("transformer_block_bucketing",)))
    assert found.roles == {0: 4} and found.checked == (0, 3)
    assert found.verdict.outcome is Outcome.PASS and found.verdict.evidence["collectives"] > 20
    assert str(found).splitlines()[:2] == ["4 ranks in 1 role: rank 0 and 3 more", "captured as ranks 0, 3"]


@pytest.mark.nightly
def test_uneven_shards_agree_on_a_mesh_larger_than_this_machine():
    heard = []
    found = compare_schedules(small({"dp_shard": 48}).override(UNEVEN), progress=heard.append)
    assert len(found.roles) > 1 and sum(found.roles.values()) == 48
    assert found.verdict.outcome is Outcome.PASS
    told = [f"rank {rank}, {i} of {len(found.checked)}: capture" for i, rank in enumerate(found.checked, 1)]
    assert [stage for stage in heard if stage.endswith("capture")] == told and found.checked[-1] == 47


@pytest.mark.nightly
def test_a_pass_that_swaps_two_on_one_rank_is_told_with_both_lines():
    with user_pass("swap", swap_on_rank_1, stage="partitioned"):
        recipe = small({"dp_shard": 4}).override({"passes": ["swap"]})
        default = compare_schedules(recipe)  # it looks at ranks 0 and 3
        verdict = compare_schedules(recipe, "all").verdict
        assert compare_schedules(recipe, [1]).verdict.outcome is Outcome.UNKNOWN
    assert default.checked == (0, 3) and default.verdict.outcome is Outcome.UNKNOWN
    assert default.verdict.message == (
        "ranks 0, 3 agree, and pass 'swap' is your own, which may do something else on each rank: take --ranks all "
        "(ranks=\"all\") to capture every rank")
    assert verdict.outcome is Outcome.FAIL and verdict.evidence["rank"] == 1
    sentence, *lines = verdict.message.splitlines()
    assert sentence.startswith("rank 1 would run _c10d_functional.all_gather_into_tensor")
    assert sentence.endswith("would hang, fail or compute wrong values")
    assert [line.split(":")[0].strip() for line in lines] == ["rank 0", "rank 1"]
    places = ("decoder.py:", "llama3.py:", "layers.py:", "parameter ")
    assert all(any(place in line for place in places) for line in lines) and lines[0][8:] != lines[1][8:]


def test_one_that_a_rank_does_not_launch_is_told():
    def more_on_the_last(gm):
        if dist.get_rank() == 3 and facts_of(gm).part == "backward":
            wait = gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)[-1]
            start = wait.all_input_nodes[0]
            with gm.graph.inserting_after(wait):
                again = gm.graph.node_copy(start, lambda node: node)
            with gm.graph.inserting_after(again):
                gm.graph.call_function(wait.target, (again,)).meta = dict(wait.meta)
        return gm

    with user_pass("more", more_on_the_last, stage="partitioned"):
        verdict = compare_schedules(small({"dp_shard": 4}).override({"passes": ["more"]})).verdict
    assert verdict.outcome is Outcome.FAIL and "rank " in verdict.message.splitlines()[1]


@pytest.mark.nightly
def test_a_pass_of_ones_own_that_is_the_same_on_all_ranks_passes_with_all():
    with user_pass("same", lambda gm: gm, stage="partitioned"):
        recipe = small({"dp_shard": 2}).override({"model.n_layers": 1, "passes": ["same"]})
        assert compare_schedules(recipe).verdict.outcome is Outcome.PASS  # its two ranks are all
        assert compare_schedules(recipe, [0]).verdict.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(("ranks", "message"), [
    ("most", "ranks 'most': expected roles, all, or ranks such as 0,3"),
    ([4], "rank 4: the mesh has ranks 0 to 3"),
    ([], "rank none: the mesh has ranks 0 to 3"),
])
def test_bad_ranks(ranks, message):
    with pytest.raises(WorkbenchError) as caught:
        compare_schedules(small(FSDP_TP).override({"model.n_layers": 1}), ranks)
    assert str(caught.value) == message


@pytest.mark.nightly
def test_the_command_with_a_pass_that_branches_on_the_rank(capsys):
    command = ["schedule", "llama3", "--set", "mesh.dp_shard=2", "mesh.tp=2", "model.n_layers=1"]
    with user_pass("swap", swap_on_rank_1, stage="partitioned"):
        command += ["passes=['swap']", "joint_passes=[]"]
        assert main(command) == 0
        assert "collectives UNKNOWN: ranks 0, 3 agree, and pass 'swap' is your own" in capsys.readouterr().out
        assert main([*command, "--ranks", "all"]) == 1
    assert "collectives FAIL: rank 1 would run _c10d_functional.all_gather_into_tensor" in capsys.readouterr().out


def test_the_command(capsys):
    small_llama3 = ["llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", "model.n_layers=1"]
    assert main(["schedule", *small_llama3, "--ranks", "all"]) == 0
    assert "captured as ranks 0, 1\ncollectives PASS: " in capsys.readouterr().out
    assert main(["schedule", *small_llama3, "--ranks", "1"]) == 0
    assert "captured as rank 1\ncollectives UNKNOWN: one rank was captured" in capsys.readouterr().out
    assert main(["schedule", *small_llama3, "--ranks", "5"]) == 2
    assert capsys.readouterr().err == "workbench: error: rank 5: the mesh has ranks 0 to 1\n"
