"""The schedules of all ranks, compared on fake worlds: roles, seeded faults, source lines, bad input."""

import pytest
from faults import swap_on_rank_1
from on_ranks import FSDP_TP, small, user_pass

from workbench import WorkbenchError, author, fake_world, load_recipe
from workbench.cli import main
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


def test_bad_ranks():
    recipe = small(FSDP_TP).override({"model.n_layers": 1})
    with pytest.raises(WorkbenchError, match="ranks 'most': expected roles, all, or ranks such as 0,3"):
        compare_schedules(recipe, "most")
    with pytest.raises(WorkbenchError, match="rank none: the mesh has ranks 0 to 3"):
        compare_schedules(recipe, [])


SMALL = ["llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", "model.n_layers=1"]


def test_the_command(capsys):
    assert main(["schedule", *SMALL, "--ranks", "all"]) == 0
    assert "captured as ranks 0, 1\ncollectives PASS: " in capsys.readouterr().out
    assert main(["schedule", *SMALL, "--ranks", "1"]) == 0
    assert "captured as rank 1\ncollectives UNKNOWN: one rank was captured" in capsys.readouterr().out
    assert main(["schedule", *SMALL, "--ranks", "5"]) == 2
    assert capsys.readouterr().err == "workbench: error: rank 5: the mesh has ranks 0 to 1\n"


def test_a_pass_that_swaps_two_on_one_rank_is_told_with_both_lines(capsys):
    command = ["schedule", "llama3", "--set", "mesh.dp_shard=3", "mesh.tp=1", *SMALL[4:], "joint_passes=[]",
               "passes=['swap']"]
    with user_pass("swap", swap_on_rank_1, stage="partitioned"):
        assert main(command) == 0
        assert "collectives UNKNOWN: ranks 0, 2 agree, and pass 'swap' is your own" in capsys.readouterr().out
        assert main([*command, "--ranks", "0,1"]) == 1
    roles, checked, sentence, *lines = capsys.readouterr().out.splitlines()
    assert (roles, checked) == ("3 ranks in 2 roles: rank 0 and 1 more, rank 2", "captured as ranks 0, 1")
    assert sentence.startswith("collectives FAIL: rank 1 would run _c10d_functional.all_gather_into_tensor")
    assert [line.split(":")[0].strip() for line in lines] == ["rank 0", "rank 1"]
    places = ("decoder.py:", "llama3.py:", "layers.py:", "parameter ")
    assert all(any(place in line for place in places) for line in lines) and lines[0][8:] != lines[1][8:]
