"""Checkpoints: a resumed run is bitwise the run that was not interrupted, and nothing that goes wrong loses one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys

import cloudpickle
import numpy
import pytest
import torch
from full_disk import files_of_at_most
from on_ranks import small
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR

from workbench.authoring.author import author
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.pipeline import checkpoints
from workbench.pipeline import train as training
from workbench.pipeline.build import build
from workbench.pipeline.checkpoints import ABOUT, SAVING, Checkpoints
from workbench.pipeline.run import run
from workbench.torch_api import determinism
from workbench.world.mesh import World, current_world
from workbench.world.ranks import RankError, ranks

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ALONE = World("gloo", 1, 0, torch.device("cpu"))
EAGER_WHOLE, WHOLE_EAGER = ("eager", "whole"), ("whole", "eager")


def go_on(recipe, kind, steps, folder=None, save_every=None, world=None):
    """Train up to `steps`, "eager" or "whole": (first step, losses, everything left on this rank)."""
    recipe = recipe.override({"training.steps": steps, "training.step": "whole" if kind == "whole" else "pair"})
    world = world or current_world()
    built = build(recipe, world) if kind == "whole" else None
    authored = built.authored if built else author(recipe, world)
    kept = []
    made = training.optimizer_of
    training.optimizer_of = lambda authored: kept.append(made(authored)) or kept[-1]
    try:
        seen = training.train(authored, built and built.step, folder=folder, save_every=save_every)
    finally:
        training.optimizer_of = made
    optimizer = built.step.optimizer if built else kept[0]
    return seen.first_step, seen.losses, left(authored.module, optimizer)


def left(module, optimizer, whole=False):
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, parameter in module.named_parameters():
        found |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    found = {name: (v.full_tensor() if whole and hasattr(v, "full_tensor") else getattr(v, "_local_tensor", v))
             for name, v in found.items()}
    return {name: value.detach().clone() for name, value in found.items()} | {"random": torch.get_rng_state()}


def interrupted(recipe, first, then, folder):
    """(names that differ from the run without an interruption, where the second run began)."""
    torch.manual_seed(current_world().rank)
    _, losses, wanted = go_on(recipe, "eager", 4)
    torch.manual_seed(current_world().rank)
    go_on(recipe, first, 2, folder)
    torch.manual_seed(99)
    began, resumed, found = go_on(recipe, then, 4, folder)
    assert resumed == losses[2:] and wanted.keys() == found.keys()
    return [name for name in wanted if not torch.equal(wanted[name], found[name])], began


@pytest.mark.nightly  # quick: test_a_resumed_schedule_and_all_random_numbers_go_on
@pytest.mark.parametrize(("first", "then"), [("whole", "whole"), EAGER_WHOLE, WHOLE_EAGER])
def test_a_resumed_run_is_bitwise_the_one_without_an_interruption(pool2, tmp_path, first, then):
    for odd, began in pool2.run(interrupted, small({"dp_shard": 2}), first, then, tmp_path):
        assert odd == [] and began == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


def saved_whole(recipe, folder):
    built = build(recipe.override({"training.step": "whole", "training.steps": 2}), current_world())
    training.train(built.authored, built.step, folder=folder)
    return left(built.authored.module, built.step.optimizer, whole=True)


def loaded_whole(recipe, folder):
    authored = author(recipe, current_world())
    optimizer = training.optimizer_of(authored)
    assert Checkpoints(folder, authored, optimizer).resume() == 2
    return left(authored.module, optimizer, whole=True)


def same(one, other):
    names = one.keys() - {"random"}
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in names)


def test_another_mesh_reads_the_same_tensors(pool2, tmp_path):
    saved = pool2.run(saved_whole, small({"tp": 2}), tmp_path)[0]
    assert same(saved, pool2.run(loaded_whole, small({"dp_shard": 2}), tmp_path)[1])
    assert same(saved, loaded_whole_alone(tmp_path))


def loaded_whole_alone(folder):
    authored = author(small({}), ALONE)
    optimizer = training.optimizer_of(authored)
    assert Checkpoints(folder, authored, optimizer).resume() == 2
    return left(authored.module, optimizer, whole=True)


@pytest.mark.nightly
def test_four_ranks_and_two_read_each_other_s(pool4, pool2, tmp_path):
    saved = pool4.run(saved_whole, small({"dp_shard": 2, "tp": 2}), tmp_path)[0]
    assert same(saved, pool2.run(loaded_whole, small({"tp": 2}), tmp_path)[0])


def killed(recipe, folder):
    """Training whose second checkpoint never ends: rank 1 is killed in the middle of a write."""
    from torch.distributed.checkpoint import filesystem

    written, write = [], filesystem._write_item

    def killing(*args, **keywords):
        written.append(1)
        if len(written) == 4 and (folder / "step_00000002").exists() and current_world().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **keywords)

    step = Checkpoints.save

    def counting(self, steps):
        written.clear()
        return step(self, steps)

    filesystem._write_item, Checkpoints.save = killing, counting
    return go_on(recipe, "eager", 4, folder, 2)


@pytest.mark.ranks
def test_kill_in_the_middle_of_a_save_loses_no_earlier_checkpoint(tmp_path):
    recipe = small({"dp_shard": 2})
    with ranks(2, backend="gloo", timeout=120, echo="none") as pool:
        with pytest.raises(RankError):
            pool.run(killed, recipe, tmp_path)
        left = {p.name for p in tmp_path.iterdir()} - {SAVING}  # which the other rank removes if it still runs
        assert left == {"step_00000002"}
        for odd, began in pool.run(after_the_kill, recipe, tmp_path):
            assert odd == [] and began == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


def after_the_kill(recipe, folder):
    began, _, found = go_on(recipe, "eager", 4, folder)
    wanted = go_on(recipe, "eager", 4)[2]
    return [name for name in wanted if name != "random" and not torch.equal(wanted[name], found[name])], began


@pytest.fixture
def trained(tmp_path):
    """A folder with checkpoints after 1 and 2 steps of one rank."""
    go_on(small({}), "eager", 2, tmp_path, 1, world=ALONE)
    return tmp_path


def resumed(folder, **changes):
    return go_on(small({}).override(changes), "eager", 3, folder, world=ALONE)


def message(folder, **changes):
    with pytest.raises(WorkbenchError) as told:
        resumed(folder, **changes)
    return str(told.value)


DELETE = "delete this folder, and training resumes from the checkpoint before"


def test_a_truncated_checkpoint_is_named_and_the_one_before_still_loads(trained):
    place = trained / "step_00000002"
    file = next(place.glob("*.distcp"))
    size = file.stat().st_size
    os.truncate(file, size - 7)
    assert message(trained) == (
        f"checkpoint {place}: {file.name} has {size - 7:,} bytes, and {size:,} were written: {DELETE}")
    for each in place.iterdir():
        each.unlink()
    place.rmdir()
    assert resumed(trained)[0] == 1


def test_a_half_written_checkpoint_is_named(trained):
    (trained / "step_00000002" / ABOUT).unlink()
    assert message(trained) == (
        f"checkpoint {trained / 'step_00000002'}: it is half written: about.json is missing: {DELETE}")


def test_damage_that_sizes_do_not_show_is_torch_s_to_tell(trained):
    place = trained / "step_00000002"
    file = place / ".metadata"
    file.write_bytes(b"\0" * file.stat().st_size)
    told = message(trained)
    assert told.startswith(f"checkpoint {place}: torch.distributed.checkpoint cannot read it (")
    assert told.endswith(DELETE)


def test_a_checkpoint_of_another_model_is_refused(trained):
    assert message(trained, **{"model.ffn_dim": 64}) == (
        f"checkpoint {trained / 'step_00000002'}: it is of another model: model.ffn_dim is 384 there and 64 in recipe "
        "'small': take its recipe, or another folder")


def test_a_checkpoint_of_another_format_is_refused(trained):
    about = trained / "step_00000002" / ABOUT
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 9}))
    assert message(trained) == (f"checkpoint {about.parent}: it has format 9, and this workbench reads 2: read it with "
                                "the workbench that wrote it")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    assert message(below) == f"checkpoints {below}: the folder cannot be made: Not a directory"
    authored = author(small({}), ALONE)
    with pytest.raises(WorkbenchError) as told:  # a folder that has become a file since the run began
        Checkpoints(below, authored, training.optimizer_of(authored)).save(2)
    assert str(told.value).startswith(f"checkpoint {below}/step_00000002: it cannot be written: ")


def test_a_full_disk_keeps_the_checkpoint_before_and_leaves_no_part(tmp_path):
    authored = author(small({}), ALONE)
    saved = Checkpoints(tmp_path, authored, training.optimizer_of(authored))
    first = saved.save(1)
    with files_of_at_most(20_000), pytest.raises(WorkbenchError) as told:
        saved.save(2)
    assert str(told.value) == (f"checkpoint {tmp_path / 'step_00000002'}: it cannot be written: File too large: free "
                               "space there, or take another folder")
    assert list(tmp_path.iterdir()) == [first] and saved.resume() == 1


@pytest.mark.parametrize(("given", "told"), [
    ({"save_every": 1}, "save_every 1 without a folder: say where the checkpoints go"),
    ({"save_every": 0, "folder": "x"}, "save_every 0: give a whole number of steps, 1 or more"),
    ({"save_every": -2, "folder": "x"}, "save_every -2: give a whole number of steps, 1 or more"),
    ({"save_every": True, "folder": "x"}, "save_every True: give a whole number of steps, 1 or more"),
    ({"folder": __file__}, f"checkpoints {__file__}: is a file: give a folder"),
    ({"scheduler": lambda optimizer: ReduceLROnPlateau(optimizer)},
     "train(..., scheduler=ReduceLROnPlateau): it reads a validation loss, and train has none: take a scheduler that "
     "counts steps"),
])
def test_what_train_refuses(given, told):
    with pytest.raises(WorkbenchError, match=f"^{re.escape(told)}$"):
        training.train(author(small({}), ALONE), **given)


def test_a_run_with_nothing_left_to_train_is_refused(trained):
    with pytest.raises(WorkbenchError) as told:
        run(small({}).override({"training.steps": 2}), checkpoints=trained)
    assert str(told.value) == (f"checkpoint {trained / 'step_00000002'}: it has taken 2 steps, and training.steps is "
                               "2: set more steps, or take another folder")


def test_a_learning_rate_that_would_be_ignored_is_refused(trained):
    assert message(trained, **{"training.lr": 0.5}) == (
        f"checkpoint {trained / 'step_00000002'}: a resumed run keeps its learning rate: training.lr is 0.001 there "
        "and 0.5 in recipe 'small': take the same, or another folder")


def scheduled(optimizer):
    """A warm-up, then a decay whose factor depends on the rate before: only a saved state can go on with it."""
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.25, total_iters=2), ExponentialLR(optimizer, 0.5)], [2])


def with_schedule(recipe, kind, steps, folder, scheduler):
    """Train with dice from Python, numpy and torch on each step: (losses, rates, dice, everything left)."""
    recipe = recipe.override({"training.steps": steps, "training.step": "whole" if kind == "whole" else "pair"})
    built = build(recipe, current_world()) if kind == "whole" else None
    authored = built.authored if built else author(recipe, current_world())
    kept, rates, dice = [built.step.optimizer] if built else [], [], []
    made = training.optimizer_of
    training.optimizer_of = lambda authored: kept.append(made(authored)) or kept[-1]

    def throw(step, loss):
        rates.append([float(group["lr"]) for group in kept[0].param_groups])
        dice.append((random.random(), float(numpy.random.normal()), float(torch.rand(()))))

    try:
        seen = training.train(authored, built and built.step, folder=folder, scheduler=scheduler, progress=throw)
    finally:
        training.optimizer_of = made
    return seen.losses, rates, dice, left(authored.module, kept[0])


def interrupted_schedule(recipe, first, then, folder, scheduler):
    """What differs from the run without an interruption, and its learning rates."""
    for seed in (numpy.random.seed, random.seed, torch.manual_seed):
        seed(current_world().rank)
    wanted = with_schedule(recipe, "eager", 5, None, scheduler)
    for seed in (numpy.random.seed, random.seed, torch.manual_seed):
        seed(current_world().rank)
    with_schedule(recipe, first, 3, folder, scheduler)
    for seed in (numpy.random.seed, random.seed, torch.manual_seed):
        seed(99)
    found = with_schedule(recipe, then, 5, folder, scheduler)
    odd = [name for name, value in wanted[3].items() if not torch.equal(value, found[3][name])]
    odd += [what for what, one, other in zip(("losses", "rates", "dice"), wanted, found, strict=False)
            if one[3:] != other]
    return odd, [rate[0] for rate in wanted[1]]


@pytest.mark.parametrize(("first", "then"), [
    ("whole", "whole"), *(pytest.param(*each, marks=pytest.mark.nightly) for each in (EAGER_WHOLE, WHOLE_EAGER))])
def test_a_resumed_schedule_and_all_random_numbers_go_on(pool2, tmp_path, first, then):
    for odd, rates in pool2.run(interrupted_schedule, small({"dp_shard": 2}), first, then, tmp_path, scheduled):
        assert odd == []
        assert rates == pytest.approx([0.625e-3, 1e-3, 0.5e-3, 0.25e-3, 0.125e-3])


def forgets(recipe, folder, what):
    """The same, where a checkpoint forgets something."""
    if what == "numpy":
        checkpoints.random_state = lambda: determinism.random_state() | {"numpy": None}
    elif what == "scheduler":
        Checkpoints._set_rates = lambda self, place: None
    else:
        checkpoints._RATES = ()
    try:
        return interrupted_schedule(recipe, "eager", "eager", folder, scheduled)[0]
    finally:
        checkpoints.random_state, Checkpoints._set_rates = determinism.random_state, SET_RATES
        checkpoints._RATES = ("lr", "initial_lr")


SET_RATES = Checkpoints._set_rates


@pytest.mark.parametrize(("what", "odd"), [
    ("numpy", ["dice"]), ("scheduler", ["rates"]), pytest.param("rates", ["rates"], marks=pytest.mark.nightly)])
def test_the_test_above_sees_what_a_checkpoint_forgets(pool2, tmp_path, what, odd):
    found = pool2.run(forgets, small({"dp_shard": 2}), tmp_path, what)[0]
    assert set(odd) <= set(found) and ("losses" in found or what == "numpy")


@pytest.mark.filterwarnings("error:Detected call")
def test_a_whole_step_with_a_schedule_gives_no_warning():
    built = build(small({}).override({"training.step": "whole", "training.steps": 2}), ALONE)
    training.train(built.authored, built.step, scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5))
    assert float(built.step.optimizer.param_groups[0]["lr"]) == 0.25e-3


def test_another_scheduler_is_refused(trained):
    with pytest.raises(WorkbenchError) as told:
        training.train(author(small({}).override({"training.steps": 3}), ALONE), folder=trained,
                       scheduler=lambda optimizer: ExponentialLR(optimizer, 0.5))
    assert str(told.value) == (
        f"checkpoint {trained / 'step_00000002'}: its run had no scheduler, and this one has scheduler ExponentialLR: "
        "give train the same scheduler, or take another folder")


def test_a_file_of_random_state_that_cannot_be_read_is_named(trained):
    file = trained / "step_00000002" / "random_0.pt"
    file.write_bytes(b"\0" * file.stat().st_size)
    told = message(trained)
    assert told.startswith(f"checkpoint {file.parent}: random_0.pt cannot be read (") and told.endswith(DELETE)


@pytest.mark.nightly  # quick: test_the_command_saves_and_resumes, and the resumed schedule
def test_a_run_on_ranks_saves_resumes_and_tells_so(pool2, tmp_path):
    recipe = small({"dp_shard": 2}).override({"training.step": "whole", "training.steps": 2})
    run(recipe, world=pool2, progress=False, checkpoints=tmp_path, save_every=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    report = run(recipe.override({"training.steps": 3}), world=pool2, progress=False, checkpoints=tmp_path)
    assert report.training.first_step == 2 and "in 1 steps after the 2 of a checkpoint" in report.table()
    whole = run(recipe.override({"training.steps": 3}), world=pool2, progress=False)
    assert whole.training.losses[2:] == report.training.losses


@pytest.mark.nightly
def test_the_command_saves_and_resumes(tmp_path, capsys):
    command = ["run", "llama3_whole_step", "--world", "gloo", "--checkpoints", str(tmp_path), "--save-every", "1",
               "--set", "model.n_layers=1", "data.seq_len=16", "mesh.dp_shard=1", "expect.loss_falls=false",
               "joint_passes=[]", "passes=[]"]
    assert main([*command, "training.steps=2"]) == 0
    assert main([*command, "training.steps=3"]) == 0
    assert "in 1 steps after the 2 of a checkpoint" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_0000000{n}" for n in (1, 2, 3)]
    assert main([*command, "training.steps=4", "model.ffn_dim=64"]) == 2
    assert "it is of another model: model.ffn_dim is 384 there and 64 in recipe" in capsys.readouterr().err
