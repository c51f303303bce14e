"""Checkpoints: a resumed run is bitwise the run that was not interrupted, and nothing that goes wrong loses one."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
from unittest import mock

import numpy
import pytest
import torch
from full_disk import files_of_at_most
from on_ranks import small
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, SequentialLR

from workbench import Recipe, WorkbenchError, World, author, build, current_world, register_model, run
from workbench.lab.weights.checkpoints import ABOUT, SAVING, Checkpoints, checked
from workbench.pipeline import train as training

pytestmark = pytest.mark.integration
ALONE = World("gloo", 1, 0, torch.device("cpu"))


def scheduled(optimizer):
    """A warm-up, then a decay whose factor depends on the rate before: only a saved state can go on with it."""
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.25, total_iters=2), ExponentialLR(optimizer, 0.5)], [2])


def go_on(recipe, kind, steps, folder=None, save_every=None, world=None, scheduler=None):
    """Train up to `steps`, "eager" or "whole", with dice thrown on each step.

    (first step, losses, learning rates, dice, everything left)
    """
    recipe = recipe.override({"training.steps": steps, "training.step": "whole" if kind == "whole" else "pair"})
    world = world or current_world()
    built = build(recipe, world) if kind == "whole" else None
    authored = built.authored if built else author(recipe, world)
    make, rates, dice = training.optimizer_of, [], []
    optimizers = [built.step.optimizer] if built else []

    def kept(authored):
        optimizers.append(make(authored))
        return optimizers[-1]

    def throw(step, loss):
        rates.append([float(group["lr"]) for group in optimizers[0].param_groups])
        dice.append((random.random(), float(numpy.random.normal()), float(torch.rand(()))))

    with mock.patch.object(training, "optimizer_of", kept):
        seen = training.train(authored, built and built.step, folder=folder, save_every=save_every, progress=throw,
                              scheduler=scheduler)
    return seen.first_step, seen.losses, rates, dice, left(authored.module, optimizers[0])


def left(module, optimizer):
    """Whole tensors: parameters, buffers and the optimizer's state."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, parameter in module.named_parameters():
        tensors |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    wholes = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in tensors.items()}
    return {name: value.detach().clone() for name, value in wholes.items()}


def seed(number):
    for start in (numpy.random.seed, random.seed, torch.manual_seed):
        start(number)


def interrupted(recipe, first, then, folder):
    """(what differs from the run without an interruption, its learning rates, where the second run began)."""
    seed(97)  # what the process has drawn before is of no effect
    _, *wanted, state = go_on(recipe, "eager", 5, scheduler=scheduled)
    seed(98)
    go_on(recipe, first, 3, folder, scheduler=scheduled)
    seed(99)
    began, *resumed, found = go_on(recipe, then, 5, folder, scheduler=scheduled)
    odd = [name for name, value in state.items() if not torch.equal(value, found[name])]
    odd += [what for what, one, other in zip(("losses", "rates", "dice"), wanted, resumed, strict=True)
            if one[3:] != other]
    return odd, [rate[0] for rate in wanted[1]], began


@pytest.mark.parametrize(("first", "then"), [
    ("eager", "whole"), pytest.param("whole", "whole", marks=pytest.mark.nightly)])
def test_a_resumed_run_is_bitwise_the_one_without_an_interruption(pool2, tmp_path, first, then):
    for odd, rates, began in pool2.run(interrupted, small({"dp_shard": 2}), first, then, tmp_path):
        assert odd == [] and began == 3
        assert rates == pytest.approx([0.625e-3, 1e-3, 0.5e-3, 0.25e-3, 0.125e-3])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000005"]


class Counting(torch.nn.Module):
    """A persistent buffer holds what this rank has read, and the loss depends on it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("same", torch.ones(2))

    def forward(self, tokens, targets):
        with torch.no_grad():
            self.seen.add_(tokens.float().mean())
        logits = self.head(self.embed(tokens)) * torch.tanh(self.seen / 1000)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_buffer_that_each_rank_fills_comes_back_on_each_rank_and_on_no_other_mesh(pool2, tmp_path):
    register_model("counting", sizes={"vocab_size": 256, "max_seq_len": 64})(lambda sizes: Counting())
    recipe = Recipe(name="small", mesh={"dp_shard": 2}, model={"family": "counting"}, data={"seq_len": 16})
    assert [odd for odd, *_ in pool2.run(interrupted, recipe, "eager", "eager", tmp_path)] == [[], []]
    place = tmp_path / "step_00000005"
    with pytest.raises(WorkbenchError) as error:
        checked(place, recipe.override({"mesh.dp_shard": 1}))
    assert str(error.value) == (
        f"checkpoint {place}: buffer seen has other values on each rank of mesh dp_shard 2, and recipe 'small' has "
        "mesh one rank: resume on the mesh that saved it, or take another folder")


def saved_whole(recipe, folder):
    built = build(recipe.override({"training.step": "whole", "training.steps": 2}), current_world())
    training.train(built.authored, built.step, folder=folder)
    return left(built.authored.module, built.step.optimizer)


def loaded(recipe, folder, world=None):
    authored = author(recipe, world or current_world())
    optimizer = training.optimizer_of(authored)
    assert Checkpoints(folder, authored, optimizer).resume() == 2
    return left(authored.module, optimizer)


def test_another_mesh_reads_the_same_tensors(pool2, tmp_path):
    saved = pool2.run(saved_whole, small({"tp": 2}), tmp_path)[0]
    on_two = pool2.run(loaded, small({"dp_shard": 2}), tmp_path)
    for other in (*on_two, loaded(small({}), tmp_path, ALONE)):
        assert saved.keys() == other.keys()
        assert [name for name in saved if not torch.equal(saved[name], other[name])] == []


def killed(folder):
    """Training whose second checkpoint never ends: the process is killed in the middle of a write."""
    from torch.distributed.checkpoint import filesystem

    writes, write = [], filesystem._write_item

    def killing(*args, **keywords):
        writes.append((folder / "step_00000002").exists())
        if sum(writes) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args, **keywords)

    filesystem._write_item = killing
    go_on(small({}), "eager", 4, folder, 2, world=ALONE)


def test_kill_in_the_middle_of_a_save_loses_no_earlier_checkpoint(tmp_path):
    child = os.fork()
    if not child:
        try:
            killed(tmp_path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000002", SAVING}
    assert go_on(small({}), "eager", 3, tmp_path, world=ALONE)[0] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory):
    """A folder with checkpoints after 1 and 2 steps of one rank, which no test changes."""
    folder = tmp_path_factory.mktemp("run")
    go_on(small({}), "eager", 2, folder, 1, world=ALONE)
    return folder


def message(folder, scheduler=None, **changes):
    with pytest.raises(WorkbenchError) as error:
        go_on(small({}).override(changes), "eager", 3, folder, world=ALONE, scheduler=scheduler)
    return str(error.value)


def truncated(file):
    os.truncate(file, file.stat().st_size - 7)


def blank(file):
    file.write_bytes(b"\0" * file.stat().st_size)


def other_format(file):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 9}))


DELETE = "delete this folder, and training resumes from the checkpoint before"
ANOTHER = ": a run resumes with the same model and learning rate: take its recipe, or another folder"
MISFITS = [
    (ABOUT, os.unlink, f": about.json cannot be read: {DELETE}"),
    (ABOUT, other_format, ": it has format 9, and this workbench reads 4: read it with the workbench that wrote it"),
    ("", {"model.ffn_dim": 64}, f": model.ffn_dim is 384 there and 64 in recipe 'small'{ANOTHER}"),
    ("", {"training.lr": 0.5}, f": training.lr is 0.001 there and 0.5 in recipe 'small'{ANOTHER}"),
    ("", {"scheduler": scheduled}, ": its run had no scheduler, and this one has scheduler SequentialLR: give train "
                                   "the same scheduler, or take another folder"),
    (".metadata", blank, f": torch.distributed.checkpoint cannot read it (.*): {DELETE}"),
    ("__0_0.distcp", truncated, f": __0_0.distcp has .* bytes, and .* were written: {DELETE}"),
]


def test_a_checkpoint_that_a_run_cannot_resume_from_is_named(run_of_two_steps, tmp_path):
    for number, (file, change, said) in enumerate(MISFITS):
        trained = shutil.copytree(run_of_two_steps, tmp_path / str(number))
        place = trained / "step_00000002"
        if file:
            change(place / file)
        found = message(trained, **({} if file else change))
        assert re.fullmatch(re.escape(f"checkpoint {place}{said}").replace(r"\.\*", ".*"), found)
    shutil.rmtree(place)  # as the last sentence says
    assert go_on(small({}), "eager", 3, trained, world=ALONE)[0] == 1
    with pytest.raises(WorkbenchError, match="it has taken 2 steps, and training.steps is 2: set more steps, or take"):
        run(small({}).override({"training.steps": 2}), checkpoints=run_of_two_steps)


def on_a_full_disk(folder):
    """(what a save says whose second rank has no room, the steps that a run resumes after)."""
    authored = author(small({"dp_shard": 2}), current_world())
    saved = Checkpoints(folder, authored, training.optimizer_of(authored))
    saved.save(1)
    room = files_of_at_most(20_000) if current_world().rank else contextlib.nullcontext()
    with room, pytest.raises(WorkbenchError) as error:
        saved.save(2)
    return str(error.value), saved.resume()


def test_a_full_disk_keeps_the_checkpoint_before_and_leaves_no_part(pool2, tmp_path):
    for said, steps in pool2.run(on_a_full_disk, tmp_path):
        assert said.startswith(f"checkpoint {tmp_path / 'step_00000002'}: it cannot be written: ") and steps == 1
        assert said.endswith(": free space there, or take another folder")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_what_train_refuses():
    for options, said in [
        ({"save_every": 1}, "save_every 1 without a folder: say where the checkpoints go"),
        ({"save_every": 0, "folder": "x"}, "save_every 0: give a number of steps, 1 or more"),
    ]:
        with pytest.raises(WorkbenchError, match=f"^{re.escape(said)}$"):
            training.train(author(small({}), ALONE), **options)
