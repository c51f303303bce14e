"""Checkpoints: a resumed run is bitwise the run that was not interrupted, and nothing that goes wrong loses one."""

from __future__ import annotations

import json
import os
import signal
import sys

import cloudpickle
import pytest
import torch
from on_ranks import small

from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.pipeline import train as training
from workbench.pipeline.build import build
from workbench.pipeline.checkpoints import ABOUT, SAVING, Checkpoints
from workbench.world.mesh import World, current_world
from workbench.world.ranks import RankError, ranks

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ALONE = World("gloo", 1, 0, torch.device("cpu"))


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


@pytest.mark.parametrize(("first", "then"), [("whole", "whole"), ("eager", "whole"), ("whole", "eager")])
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


@pytest.mark.slow
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
    return go_on(recipe, "whole", 4, folder, 2)


@pytest.mark.ranks
def test_kill_in_the_middle_of_a_save_loses_no_earlier_checkpoint(tmp_path):
    recipe = small({"dp_shard": 2})
    with ranks(2, backend="gloo", timeout=120, echo="none") as pool:
        with pytest.raises(RankError):
            pool.run(killed, recipe, tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == [SAVING, "step_00000002"]
        for odd, began in pool.run(after_the_kill, recipe, tmp_path):
            assert odd == [] and began == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


def after_the_kill(recipe, folder):
    began, _, found = go_on(recipe, "whole", 4, folder)
    wanted = go_on(recipe, "eager", 4)[2]
    return [name for name in wanted if name != "random" and not torch.equal(wanted[name], found[name])], began


@pytest.fixture
def trained(tmp_path):
    """A folder with checkpoints after 1 and 2 steps of one rank."""
    go_on(small({}), "eager", 2, tmp_path, 1, world=ALONE)
    return tmp_path


def resumed(folder, **changes):
    return go_on(small({}).override(changes), "eager", 2, folder, world=ALONE)


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
    assert message(trained) == (f"checkpoint {about.parent}: it has format 9, and this workbench reads 1: read it with "
                                "the workbench that wrote it")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    told = message(tmp_path / "file" / "below")
    assert told.startswith(f"checkpoint {tmp_path}/file/below/step_00000002: it cannot be written: ")


@pytest.mark.parametrize("given", [{"save_every": 1}, {"save_every": 0, "folder": "x"}])
def test_saving_needs_a_folder_and_a_step_or_more(given):
    with pytest.raises(WorkbenchError, match=r"save_every=\d\): give a folder too, and 1 step or more"):
        training.train(author(small({}), ALONE), **given)
