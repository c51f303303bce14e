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
from workbench.lab.schedule.compare import compare_schedules, roles_of

pytestmark = pytest.mark.integration
UNEVEN = {"model.vocab_size": 257, "model.n_layers": 1}


@pytest.mark.parametrize("recipe", [
    small({"dp_shard": 3, "tp": 2}).override(UNEVEN),
    load_recipe("deepseek_v3").override({"mesh.dp_shard": 6, "mesh.tp": 1, "mesh.ep": 2, "model.vocab_size": 257}),
], ids=["tp", "experts on a mesh of their own"])
def test_roles_are_what_the_shards_of_each_rank_say(recipe):
    shapes = {}
    for rank in range(6):
        with fake_world(6, rank) as world:
            authored = author(recipe, world)
            shapes[rank] = tuple(tuple(p.to_local().shape) for p in authored.module.parameters())
    with fake_world(6) as world:
        roles = roles_of(author(recipe, world))
    assert len(roles) == len(set(shapes.values())) > 1 and sum(roles.values()) == 6
    assert [shapes[rank] for rank in roles] == list(dict.fromkeys(shapes.values()))


@pytest.mark.nightly
def test_uneven_shards_agree_on_a_mesh_larger_than_this_machine():
    heard = []
    schedules = compare_schedules(small({"dp_shard": 48}).override(UNEVEN), progress=heard.append)
    assert len(schedules.roles) > 1 and sum(schedules.roles.values()) == 48 and schedules.checked[-1] == 47
    assert schedules.verdict.outcome is Outcome.PASS and schedules.verdict.evidence["collectives"] > 20
    last = len(schedules.checked)
    assert f"rank 47, {last} of {last}: capture" in heard


@pytest.mark.nightly
def test_a_pass_that_swaps_two_on_one_rank_is_told_with_both_lines(capsys):
    command = ["schedule", "llama3", "--set", "mesh.dp_shard=2", "mesh.tp=2", "model.n_layers=1", "joint_passes=[]",
               "passes=['swap']"]
    with user_pass("swap", swap_on_rank_1, stage="partitioned"):
        assert main(command) == 0
        assert "collectives UNKNOWN: ranks 0, 3 agree, and pass 'swap' is your own" in capsys.readouterr().out
        assert main([*command, "--ranks", "all"]) == 1
    roles, checked, sentence, *lines = capsys.readouterr().out.splitlines()
    assert (roles, checked) == ("4 ranks in 1 role: rank 0 and 3 more", "captured as ranks 0, 1, 2, 3")
    assert sentence.startswith("collectives FAIL: rank 1 would run _c10d_functional.all_gather_into_tensor")
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


def test_bad_ranks():
    recipe = small(FSDP_TP).override({"model.n_layers": 1})
    with pytest.raises(WorkbenchError, match="ranks 'most': expected roles, all, or ranks such as 0,3"):
        compare_schedules(recipe, "most")
    with pytest.raises(WorkbenchError, match="rank none: the mesh has ranks 0 to 3"):
        compare_schedules(recipe, [])


def test_the_command(capsys):
    small_llama3 = ["llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", "model.n_layers=1"]
    assert main(["schedule", *small_llama3, "--ranks", "all"]) == 0
    assert "captured as ranks 0, 1\ncollectives PASS: " in capsys.readouterr().out
    assert main(["schedule", *small_llama3, "--ranks", "1"]) == 0
    assert "captured as rank 1\ncollectives UNKNOWN: one rank was captured" in capsys.readouterr().out
    assert main(["schedule", *small_llama3, "--ranks", "5"]) == 2
    assert capsys.readouterr().err == "workbench: error: rank 5: the mesh has ranks 0 to 1\n"
