"""A compiled step as files: every rank trains from it as from its own build, and what does not fit is refused unrun."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import files_of_at_most

from workbench import Recipe, WorkbenchError, compile_recipe, load_recipe, run, run_artifact
from workbench.cli import main
from workbench.tools.export import artifact, loaded
from workbench.tools.export import run_artifact as run_artifact_module
from workbench.tools.export.artifact import MANIFEST, read, read_code, seal
from workbench.tools.export.code import Code, text_of
from workbench.tools.export.compiled import transform
from workbench.tools.export.load_once import load_once
from workbench.tools.own_files import import_file
from workbench.torch_api.inductor.carried import kernels_kept
from workbench.world.fake import fake_world
from workbench.world.ranks import RankError, RankPool

pytestmark = [pytest.mark.integration, pytest.mark.ranks]  # one worker compiles for all
ROOT = Path(__file__).parents[3]
TINY: dict[str, Any] = {"model.n_layers": 1, "data.seq_len": 16, "training.steps": 3}
OWN = '''
import workbench


@workbench.register_pass("odd_rank", stage="partitioned", numerics="exact")
def odd_rank(gm, example_inputs, *, options):
    """{about}"""
    {code}
    return gm
'''

def tiny(name: str, **changes: Any) -> Recipe:
    return load_recipe(name).override(TINY | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An artifact that `workbench compile` made, and what it said."""
    out = tmp_path_factory.mktemp("artifacts") / "out"
    changes = [f"{key}={value}" for key, value in TINY.items()]
    line = ["compile", "llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", *changes]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*line, "--out", str(out)]) == 0
    return out, said.getvalue()


def _trained(recipe: Recipe, out: Path, pool: RankPool) -> None:
    compile_recipe(recipe, out)
    _same_as_a_build(recipe, out, pool)


def _same_as_a_build(recipe: Recipe, out: Path, pool: RankPool) -> None:
    """Trains from the artifact, whose graphs each rank captures too, to the losses and norms of a build, bitwise."""
    ours = run_artifact(out, world=pool, verify=True, progress=False).training
    theirs = run(recipe, world=pool, progress=False).training
    assert ours is not None and theirs is not None
    assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms) and len(ours.losses) == recipe.training.steps


def test_two_ranks_of_tensor_parallelism_have_two_programs(compiled: Path) -> None:
    """The part of the vocabulary that a rank holds is a constant of its graph."""
    made = read(compiled)
    assert made.ranks == [0, 1] and made.programs[0]["graphs"] != made.programs[1]["graphs"]
    assert made.programs[0]["groups"] == ["axis:tp"]
    with fake_world(2, 1) as world:
        assert transform(tiny("llama3", mesh__dp_shard=1, mesh__tp=2), world).digest == made.programs[1]["graphs"]


def test_it_trains_as_a_build_does(by_command: tuple[Path, str], pool2: RankPool) -> None:
    _same_as_a_build(tiny("llama3", mesh__dp_shard=2, mesh__tp=1), by_command[0], pool2)


@pytest.mark.nightly
def test_a_traced_capture_trains_as_a_build_does(tmp_path: Path, pool2: RankPool) -> None:
    recipe = tiny("llama3_block_bucketing", mesh__dp_shard=2, mesh__tp=1, capture="traced")
    _trained(recipe, tmp_path / "out", pool2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama3_full_inductor_block_bucketing", "llama3_whole_step", "llama3_regional"])
def test_inductors_code_and_kernels_train_as_a_build_does(name: str, tmp_path: Path, pool2: RankPool) -> None:
    _trained(tiny(name, mesh__dp_shard=2, mesh__tp=1), tmp_path / "out", pool2)
    assert any((tmp_path / "out" / "kernels").rglob("*.so"))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama3_checkpointing_block_bucketing", "deepseek_v3", "deepseek_v3_block_bucketing"])
def test_four_ranks_train_as_a_build_does(name: str, tmp_path: Path, pool4: RankPool) -> None:
    layers = 2 if name.startswith("deepseek") else 1  # its first layer has no experts
    _trained(tiny(name, mesh__dp_shard=2, mesh__tp=2, model__n_layers=layers), tmp_path / "out", pool4)


@pytest.mark.nightly
def test_what_is_compared_between_processes_has_no_address() -> None:
    """Dropless experts sum sizes that are known on the ranks alone, by a Python function."""
    with fake_world(2) as world:
        made = transform(tiny("deepseek_v3", mesh__dp_shard=2, mesh__tp=1, model__n_layers=2), world)
    texts = list(map(text_of, made.state.graphs))
    assert "sym_sum" in texts[0] and not any(" at 0x" in text for text in texts)


def test_training_resumes_and_takes_another_learning_rate(compiled: Path, tmp_path: Path,
                                                          pool2: RankPool) -> None:
    first = run_artifact(compiled, world=pool2, checkpoints=tmp_path / "c", progress=False)
    more = run_artifact(compiled, world=pool2, changes={"training.steps": 5, "training.read_loss_every": 2},
                        checkpoints=tmp_path / "c", progress=False)
    other = run_artifact(compiled, world=pool2, changes={"training.lr": 1e-9}, progress=False)
    assert first.training is not None and other.training is not None and more.training is not None
    assert more.training.first_step == 3 and len(more.training.losses) == 2 and more.ok
    other_losses, losses = other.training.losses, first.training.losses
    assert other_losses[0] == losses[0] and other_losses[1:] != losses[1:]


@pytest.mark.nightly
def test_a_program_of_another_rank_is_told_by_each_rank_s_own_capture(mine: Path, pool2: RankPool) -> None:
    resealed(mine, ranks=[1, 0])
    with pytest.raises(RankError, match="rank 0 captures other graphs here than those that the artifact was made of"):
        run_artifact(mine, world=pool2, verify=True, progress=False)


def resealed(folder: Path, **changes: Any) -> None:
    """Change an artifact's manifest, and seal it as if it had been compiled so."""
    data = {**json.loads((folder / MANIFEST).read_text()), "files": {}, **changes}
    (folder / MANIFEST).unlink()
    seal(folder, artifact.Manifest(**{key: value for key, value in data.items() if key != "fingerprint"}))


def _append(path: Path) -> None:
    path.write_text(path.read_text() + "raise SystemExit('the code was run')\n")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed": (lambda folder: _append(folder / "code" / "forward_0.py"), "code/forward_0.py was changed"),
    "truncated": (lambda folder: (folder / "code" / "backward_1.py").write_text(""), "code/backward_1.py was changed"),
    "missing": (lambda folder: (folder / "code" / "forward_1.json").unlink(), "code/forward_1.json is missing"),
    "added": (lambda folder: (folder / "code" / "more.py").write_text("x = 1"), "code/more.py was added"),
    "manifest edited": (lambda folder: (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text().replace('"n_layers": 1', '"n_layers": 2')), "was changed after it was written"),
    "manifest truncated": (lambda folder: (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text()[:-40]), "is damaged: compile the recipe again"),
    "manifest missing": (lambda folder: (folder / MANIFEST).unlink(), "is no artifact: manifest.json: No such file"),
    "another format": (lambda folder: (folder / MANIFEST).write_text('{"format": 1}'), "reads artifacts of format 4"),
    "not an object": (lambda folder: (folder / MANIFEST).write_text("[1]"), "reads artifacts of format 4"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_damaged_is_refused_and_none_of_it_is_run(what: str, mine: Path) -> None:
    damage, said = DAMAGE[what]
    damage(mine)
    with pytest.raises(WorkbenchError) as caught:
        run_artifact(mine, progress=False)
    assert said in str(caught.value) and str(mine) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("torch", "9.9.0"), ("Python", "2.7.18"), ("device", "another CPU"),
                                             ("the source of the package's models", "0" * 64)])
def test_what_was_made_for_something_else_is_refused_by_name(
        name: str, value: str, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "load_step", lambda *_: pytest.fail("it was loaded"))
    resealed(mine, made_of=read(mine).made_of | {name: value})
    said = f"{name} was {value[:12]}.* and is .* here: compile the recipe again, here"
    with pytest.raises(WorkbenchError, match=said):
        run_artifact(mine, progress=False)


def test_a_pass_of_one_s_own_that_has_changed_is_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "odd_own_pass.py", tmp_path / "out"
    file.write_text(OWN.format(about="Nothing.", code="pass"))
    import_file(file)
    recipe = tiny("llama3", mesh__dp_shard=2, mesh__tp=1, passes=["odd_rank"])
    compile_recipe(recipe, out)
    file.write_text(OWN.format(about="Nothing, in other words.", code="gm.recompile()"))
    import_file(file)
    with pytest.raises(WorkbenchError, match="the source of your own model and passes was .* and is .* here"):
        run_artifact(out, progress=False)


@pytest.mark.parametrize(("file", "said"), [
    ("passes/transformer_block_bucketing.py", "the source of pass 'transformer_block_bucketing' was"),
    ("passes/effect.py", "the source of the package's code that passes share was"),
    ("graph/capture.py", "the source of the package's captures and graphs was"),
    ("torch_api/inductor/lowering.py", "the source of the package's use of torch was"),
    ("authoring/models/llama3.py", "the source of the package's models was"),
    ("passes/cudagraph.py", ""),
    ("notebook/magics.py", ""),
])
def test_a_change_to_the_package_is_refused_where_the_step_depends_on_it(
        file: str, said: str, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, package = load_recipe("llama3_block_bucketing"), tmp_path / "workbench"
    manifest = replace(read(compiled), made_of=artifact.made_of(recipe, "gloo"))
    shutil.copytree(artifact._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(artifact, "_PACKAGE", package)
    with (package / file).open("a") as changed:
        changed.write("# more\n")
    with pytest.raises(WorkbenchError, match=said) if said else contextlib.nullcontext():
        artifact.require_same(manifest, artifact.made_of(recipe, "gloo"), compiled)


@pytest.mark.nightly
def test_ranks_that_would_launch_other_collectives_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd_launches.py"
    file.write_text(OWN.format(about="Rank 1 reduces otherwise.", code="""import torch.distributed as dist
    for node in gm.graph.nodes:
        if dist.get_rank() == 1 and "reduce_scatter" in str(node.target):
            node.args = (node.args[0], "sum", *node.args[2:]) if node.args[1] != "sum" else (
                node.args[0], "avg", *node.args[2:])
            break"""))
    import_file(file)
    with pytest.raises(WorkbenchError, match="rank 1 would run .*reduce_scatter"):
        compile_recipe(tiny("llama3", mesh__dp_shard=2, mesh__tp=1, passes=["odd_rank"]), tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["odd_launches.py"]


def test_what_no_file_can_hold_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    said = r"the forward graph holds sdpa_score0, a .* \(layers.0.attention\), which no file can hold"
    with pytest.raises(WorkbenchError, match=said):
        compile_recipe(tiny("llama3_flex", mesh__dp_shard=2, mesh__tp=1), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WorkbenchError, match="the artifact cannot be written: No space left on device"):
        compile_recipe(tiny("llama3", mesh__dp_shard=2, mesh__tp=1), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_with_constants_leaves_nothing(tmp_path: Path) -> None:
    code = Code("forward", "graph", "", (), (), constants={"t": torch.zeros(10_000)})
    with (pytest.raises(WorkbenchError, match="out: the artifact cannot be written: File too large$"),
          artifact.new_folder(tmp_path / "out") as folder, files_of_at_most(4096)):
        artifact.write_code(folder, "one", code)
    assert list(tmp_path.iterdir()) == []


CACHE_FULL = r"Inductor's cache in .* cannot be written: {}: free space there, or set TMPDIR to another folder$"


@pytest.mark.nightly
def test_a_disk_that_fills_with_inductors_cache_leaves_nothing(tmp_path: Path) -> None:
    recipe = tiny("llama3_full_inductor", mesh__dp_shard=1, mesh__tp=1)
    with pytest.raises(WorkbenchError, match=CACHE_FULL.format("File too large")), files_of_at_most(20_000):
        compile_recipe(recipe, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("raised", "said"), [
    ("CppCompileError: fatal error: error writing to x.s: No space left on device",
     CACHE_FULL.format("No space left on device")),
    ("CppCompileError: x.cpp: No such file or directory", "^CppCompileError: x.cpp: No such file or directory$"),
])
def test_only_a_compiler_that_found_a_full_disk_is_said_to_have(raised: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match=said), kernels_kept(tmp_path / "kernels"):
        raise WorkbenchError(raised)


def test_of_two_that_write_one_artifact_the_second_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="out exists already: remove it, or give another folder"), \
            artifact.new_folder(tmp_path / "out") as folder:
        with artifact.new_folder(tmp_path / "out") as other:
            (other / "first").touch()
        (folder / "second").touch()
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == ["out", "out/first"]


def test_one_that_is_slower_by_less_than_a_check_is_refused_too(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = iter([None, None])  # at the start, and before the folder takes its name
    refuse = artifact._refuse_existing
    monkeypatch.setattr(artifact, "_refuse_existing", lambda out: next(checks, out) and refuse(out))
    with (pytest.raises(WorkbenchError, match="out exists already: remove it, or give another folder"),
          artifact.new_folder(tmp_path / "out") as folder):
        (folder / "second").touch()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "first").touch()
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == ["out", "out/first"]


COMPILE_AT_ONCE = """
import os, sys, time
from pathlib import Path
from workbench import WorkbenchError, compile_recipe
from workbench.recipe.recipe import parse_recipe

recipe, out, number = parse_recipe(eval(sys.argv[1]), "test"), Path(sys.argv[2]), int(sys.argv[3])

def wait_for_the_other(line):
    (out.parent / str(number)).touch()
    while not (out.parent / str(1 - number)).exists():
        assert os.getppid() == int(sys.argv[4]), "the test has ended"
        time.sleep(0.01)

try:
    compile_recipe(recipe, out, world="gloo", progress=wait_for_the_other)
except WorkbenchError as error:
    print(error)
"""


@pytest.mark.nightly
def test_of_two_processes_that_compile_into_one_folder_one_writes_a_whole_artifact(tmp_path: Path) -> None:
    """Each has begun to write before the other is told to go on."""
    recipe, out = tiny("llama3", mesh__dp_shard=1, mesh__tp=1), tmp_path / "out"
    both = [subprocess.Popen([sys.executable, "-c", COMPILE_AT_ONCE, repr(recipe.to_dict()), str(out), str(number),
                              str(os.getpid())], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
            for number in range(2)]
    said = [each.communicate(timeout=240) for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    assert sorted(text for text, _ in said) == ["", f"{out} exists already: remove it, or give another folder\n"]
    assert read(out).ranks == [0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1", "out"]


def test_files_are_their_user_s_alone_and_none_is_a_pickle(compiled: Path) -> None:
    modes = {oct(path.stat().st_mode & 0o777) for path in compiled.rglob("*") if path.is_file()}
    assert modes == {"0o600"} and compiled.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in compiled.rglob("*") if path.is_file()} == {
        ".py", ".json", ".safetensors"}


def test_all_code_is_loaded_in_a_process_of_its_own_and_none_of_it_is_called(mine: Path) -> None:
    load_once(mine)
    _append(mine / "code" / "backward_1.py")
    with pytest.raises(SystemExit, match="the code was run"):
        load_once(mine)


def test_constants_come_back_as_they_were(tmp_path: Path) -> None:
    code = Code("forward", "graph", "def forward(self, args):\n    return [self.t + args[0]]\n", (), (("result", ""),),
                constants={"t": torch.arange(3)})
    artifact.write_code(tmp_path, "one", code)
    back = read_code(tmp_path, "one")
    assert torch.equal(back.function(tmp_path / "one.py")([1])[0], torch.arange(1, 4)) and back.outputs == code.outputs


def test_a_second_backward_is_refused(compiled: Path, pool2: RankPool) -> None:
    assert pool2.run(_twice, str(compiled))[0] == (
        "the compiled step of llama3: its backward ran already, and what its forward saved is freed: run the forward "
        "again")


def _twice(folder: str) -> str:
    from workbench import author, current_world
    from workbench.pipeline.train import Batches
    from workbench.recipe.recipe import parse_recipe
    from workbench.tools.export.loaded import load_step

    made = read(Path(folder))
    authored = author(parse_recipe(made.recipe, "test"), current_world())
    step, _ = load_step(authored, Path(folder), made)
    loss: Any = step(*Batches(authored).at(0))
    loss.backward()
    assert all(p.grad is not None and p.grad.placements == p.placements for p in authored.module.parameters())
    try:
        loss.backward()
    except WorkbenchError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.nightly
def test_the_commands(by_command: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks whose graphs are equal share a program."""
    out, said = by_command
    assert f"{out}: the step of 2 ranks as 1 program, and its verdicts\nworkbench run --artifact {out}" in said
    assert read(out).ranks == [0, 0]
    assert main(["run", "--artifact", str(out), "--verify", "--set", "training.steps=2"]) == 0
    shown = capsys.readouterr()
    assert "in 2 steps" in shown.out and "run only artifacts that you trust" in shown.err


@pytest.mark.nightly
def test_torchrun_trains_from_an_artifact_as_new_ranks_do(compiled: Path, pool2: RankPool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
               "workbench", "run", "--artifact", str(compiled), "--set", "training.steps=2", "--json",
               str(tmp_path / "r.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("llama3 on 2 gloo ranks (tp 2)") == 1 and done.stdout.splitlines()[-1] == "PASS"
    assert done.stderr.count("run only artifacts that you trust") == 1
    ours = run_artifact(compiled, world=pool2, changes={"training.steps": 2}, progress=False).training
    assert ours is not None
    assert json.loads((tmp_path / "r.json").read_text())["training"]["losses"] == ours.losses


@pytest.mark.parametrize(("line", "said"), [
    (["run"], "run: give a RECIPE, or --artifact DIR"),
    (["run", "llama3", "--verify"], "run --verify: it compares an artifact with each rank's own capture"),
    (["run", "--artifact", "x", "--level", "full"], "run --artifact x: leave out --level"),
    (["run", "--artifact", "x", "--world", "fake"], "run --artifact x: leave out --world"),
    (["run", "--artifact", "no/such"], "no/such is no artifact: manifest.json: No such file or directory"),
    (["compile", "llama3", "--out", "."], ". exists already: remove it, or give another folder"),
])
def test_wrong_lines_say_what_to_give(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "said"), [
    ({"mesh.tp": 4, "training.steps": 2}, "mesh.tp was 2 and is 4 here"),
    ({"data.seq_len": 32, "capture": "traced"},
     "data.seq_len was 16 and is 32 here; capture was joint and is traced here"),
])
def test_another_mesh_or_recipe_is_refused_with_both_values(
        changes: dict[str, Any], said: str, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_artifact_module, "on_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(WorkbenchError) as caught:
        run_artifact(compiled, changes=changes, progress=False)
    assert str(caught.value) == (
        f"artifact {compiled}: {said}: compile the recipe again, or change training.steps, training.lr, "
        "training.read_loss_every, data.path alone")


def test_a_key_that_has_its_value_already_is_no_change(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_artifact_module, "on_ranks", lambda recipe, *_, **__: pytest.fail(f"on {recipe.mesh.tp}"))
    with pytest.raises(pytest.fail.Exception, match="on 2"):
        run_artifact(compiled, changes={"mesh.tp": 2, "training.steps": 2}, progress=False)


OTHER_SIZE = "artifact {} is compiled for tp 2, and there are 4 ranks: start 2, or compile the recipe again for 4"


def test_another_number_of_torchruns_ranks_is_refused(
        compiled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--artifact", str(compiled)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"workbench: error: {OTHER_SIZE.format(compiled)}"


def test_a_pool_of_another_size_is_refused(compiled: Path, pool4: RankPool) -> None:
    with pytest.raises(WorkbenchError) as caught:
        run_artifact(compiled, world=pool4, progress=False)
    assert str(caught.value) == OTHER_SIZE.format(compiled)


def test_another_recipe_is_refused_by_both_names(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "llama3_tp", "--artifact", str(compiled)]) == 2
    assert capsys.readouterr().err == (
        f"workbench: error: run llama3_tp --artifact {compiled}: leave out llama3_tp: the artifact was compiled from "
        "recipe 'llama3'\n")
