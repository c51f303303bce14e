"""A compiled step as files: every rank trains from it as from its own build, and what does not fit is refused unrun."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from full_disk import files_of_at_most

from workbench import Outcome, RankError, Recipe, Report, WorkbenchError, fake_world, load_recipe, ranks, run
from workbench.cli import main
from workbench.lab.artifacts import all_ranks, compile_recipe, folder, run_artifact
from workbench.lab.artifacts.all_ranks import transform
from workbench.lab.artifacts.folder import MANIFEST, SUMS, made_of, new_folder, read_manifest, require_same
from workbench.lab.artifacts.program import digests, load_step, read_program
from workbench.pipeline.recipe_ranks import on_ranks
from workbench.recipe.wording import json_text
from workbench.tools.own_files import import_file
from workbench.world.ranks import RankPool

pytestmark = [pytest.mark.integration, pytest.mark.ranks]
TINY: dict[str, Any] = {"model.n_layers": 1, "data.seq_len": 16, "training.steps": 3}


def tiny(name: str, dp: int, tp: int, **changes: Any) -> Recipe:
    mesh = {"mesh.dp_shard": dp, "mesh.tp": tp}
    return load_recipe(name).override(TINY | mesh | {key.replace("__", "."): changes[key] for key in changes})


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, pool2: RankPool) -> Path:
    """An artifact of a small recipe on two ranks of tensor parallelism, which no test changes. It asks for the pool so
    that one worker compiles it.
    """
    out = tmp_path_factory.mktemp("artifacts") / "tp2"
    compile_recipe(tiny("llama3", 1, 2), out)
    return out


@pytest.fixture
def mine(compiled: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(compiled, tmp_path / "copy"))


def reseal(artifact: Path, **changes: Any) -> None:
    """Change the manifest, as if the artifact had been compiled so."""
    manifest = replace(read_manifest(artifact), **changes)
    (artifact / MANIFEST).write_text(json_text(asdict(manifest)))
    hashes = folder._hashes(artifact)
    (artifact / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in hashes.items()))


def trained(recipe: Recipe, out: Path, pool: RankPool, verify: bool = True) -> tuple[Report, Report]:
    """From the artifact, and from a build; with `verify`, each rank captures the artifact's graphs too."""
    loaded = run_artifact(out, world=pool, verify=verify, progress=False)
    built = run(recipe, world=pool, level="light", progress=False)
    assert len(loaded.training.losses) == recipe.training.steps
    return loaded, built


def assert_bitwise(loaded: Report, built: Report) -> None:
    ours, theirs = loaded.training, built.training
    assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms)


def test_two_ranks_of_tensor_parallelism_have_two_programs(compiled):
    """The part of the vocabulary that a rank holds is a constant of its graph."""
    manifest = read_manifest(compiled)
    assert manifest.ranks == [0, 1] and manifest.programs[0] != manifest.programs[1]
    assert "tp" in read_program(compiled / "program_0.pt", None).groups
    with fake_world(2, 1) as world:
        assert digests(transform(tiny("llama3", 1, 2), world)[0]) == manifest.programs[1]
    assert compiled.stat().st_mode & 0o777 == 0o700


def test_the_commands_write_one_program_for_equal_ranks_and_train_from_it(tmp_path, pool2, capsys, monkeypatch):
    out = tmp_path / "out"
    worlds = []

    def on_this_pool(recipe: Recipe, world: Any, *args: Any, **keywords: Any) -> Any:
        worlds.append(world)
        return on_ranks(recipe, pool2, *args, **keywords)

    monkeypatch.setattr(all_ranks, "on_ranks", on_this_pool)
    changes = [f"{key}={value}" for key, value in TINY.items()]
    line = ["compile", "llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", *changes, "--out", str(out)]
    assert main(line) == 0 and read_manifest(out).ranks == [0, 0]
    assert (f"{out}: the step of 2 ranks as 1 program, and its verdicts\nworkbench run-artifact {out}"
            in capsys.readouterr().out)
    file = tmp_path / "report.json"
    assert main(["run-artifact", str(out), "--verify", "--set", "training.steps=2", "--json", str(file)]) == 0
    shown = capsys.readouterr()
    assert "in 2 steps" in shown.out and "run only artifacts that you trust" in shown.err and worlds == ["gloo"]
    loaded = json.loads(file.read_text())["training"]
    built = run(tiny("llama3", 2, 1, training__steps=2), world=pool2, level="light", progress=False).training
    assert (loaded["losses"], loaded["norms"]) == (built.losses, built.norms)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "tp", "changes"), [
    ("llama3_block_bucketing", 1, {"capture": "traced"}),
    pytest.param("llama3_full_inductor_block_bucketing", 1, {}, marks=pytest.mark.compat),
    ("llama3_whole_step", 1, {}),
    ("llama3_regional", 1, {}),
    ("deepseek_v3_block_bucketing", 2, {"model__n_layers": 2}),  # its first layer has no experts
])
def test_each_kind_of_step_trains_as_a_build_does(name, tp, changes, tmp_path, request):
    recipe = tiny(name, 2, tp, **changes)
    compile_recipe(recipe, tmp_path / "out", world="gloo")
    assert_bitwise(*trained(recipe, tmp_path / "out", request.getfixturevalue(f"pool{2 * tp}")))
    if "inductor" in name:
        assert any((tmp_path / "out" / "kernels").rglob("*.so"))


def test_training_resumes_and_takes_another_learning_rate(compiled, tmp_path, pool2):
    def losses(**keywords: Any) -> list[float]:
        return run_artifact(compiled, world=pool2, progress=False, **keywords).training.losses

    first = losses(checkpoints=tmp_path / "c")
    more = losses(checkpoints=tmp_path / "c", changes={"training.steps": 5, "training.read_loss_every": 2})
    other = losses(changes={"training.lr": 1e-9, "training.steps": 2})
    assert len(more) == 2 and other[0] == first[0] and other[1] != first[1]


@pytest.mark.nightly
def test_a_program_of_another_rank_is_told_by_each_rank_s_own_capture(mine, pool2):
    reseal(mine, ranks=[1, 0])
    with pytest.raises(RankError, match="rank 0 captures other graphs here than those that the artifact was made of"):
        run_artifact(mine, world=pool2, verify=True, progress=False)


def test_an_artifact_for_gpus_is_refused_by_ranks_on_cpus(mine, pool2, monkeypatch):
    reseal(mine, world="nccl")
    monkeypatch.setattr(all_ranks, "require_same", lambda *_: None)
    with pytest.raises(RankError, match="is compiled for nccl ranks, and these are gloo: start others"):
        run_artifact(mine, world=pool2, progress=False)


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [  # each one more
    (lambda to: (to / "more.py").write_text("x = 1"), "more.py was changed"),
    (lambda to: ((to / "more.py").unlink(), os.truncate(to / "program_1.pt", 1000)),
     "program_1.pt was changed, added or lost"),
    (lambda to: os.truncate(to / SUMS, 90), "SHA256SUMS was changed"),
    (lambda to: (to / SUMS).unlink(), "is no artifact (SHA256SUMS: [Errno 2] No such file"),
]


def test_what_was_damaged_is_refused_and_none_of_it_is_run(mine, monkeypatch):
    monkeypatch.setattr(all_ranks, "on_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    for damage, message in DAMAGE:
        damage(mine)
        with pytest.raises(WorkbenchError) as caught:
            run_artifact(mine, progress=False)
        assert message in str(caught.value) and str(mine) in str(caught.value)


def test_another_mesh_or_recipe_is_refused_with_both_values(compiled, monkeypatch):
    monkeypatch.setattr(all_ranks, "on_ranks", mock.Mock(side_effect=WorkbenchError("it goes on")))
    with pytest.raises(WorkbenchError, match="data.seq_len was 16 and is 32 here; capture was joint and is traced"):
        run_artifact(compiled, changes={"data.seq_len": 32, "capture": "traced"}, progress=False)
    with pytest.raises(WorkbenchError, match="it goes on"):
        run_artifact(compiled, changes={"mesh.tp": 2, "training.steps": 2}, progress=False)


def test_what_was_made_for_another_torch_is_refused(mine, monkeypatch):
    monkeypatch.setattr(all_ranks, "on_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    here = read_manifest(mine).made_of
    reseal(mine, made_of=here | {"torch": "another"})
    with pytest.raises(WorkbenchError, match="torch was another and is .* here: compile the recipe again, here"):
        run_artifact(mine, progress=False)


OWN = '''
import workbench


@workbench.register_pass("odd_rank", stage="partitioned", numerics="exact")
def odd_rank(gm, example_inputs, *, options):
    """{}"""
    import torch.distributed as dist
    for node in gm.graph.nodes:
        if dist.get_rank() == 1 and "reduce_scatter" in str(node.target):
            other = "sum" if node.args[1] != "sum" else "avg"
            node.args = (node.args[0], other, *node.args[2:])
            break
    return gm
'''


def test_a_source_that_has_changed_makes_another_artifact(tmp_path, monkeypatch):
    """The source of the package, of a user's pass, and of each module beside it that the pass imports, also in a
    function or through another module. numpy and the standard library do not count.
    """
    files = {"helper_beside.py": "import helper_behind\nVALUE = 2\n", "helper_behind.py": "X = 1\n",
             "helper_package/__init__.py": "", "helper_package/part.py": "from .other import Y\n",
             "helper_package/other.py": "import numpy\nY = 1\n", "helper_apart.py": "Z = 1\n",
             "imports_helpers.py": "from helper_beside import VALUE\n" + OWN.format("Nothing.").replace(
                 "import torch.dist", "from helper_package import part\n    import torch.dist")}
    (tmp_path / "helper_package").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    import_file(tmp_path / "imports_helpers.py")
    own = tiny("llama3", 2, 1, passes=["odd_rank"])
    before = made_of(own, "gloo")
    assert len([part for part in before if "source of module" in part]) == 5
    changed = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "# changed\n")
        now = made_of(own, "gloo")
        changed[name] = [part for part in now if now[part] != before[part]]
        (tmp_path / name).write_text(text)
    modules = ["helper_beside", "helper_behind", "helper_package", "helper_package.part", "helper_package.other"]
    assert list(changed.values()) == [
        *([f"the source of module {module!r}"] for module in modules), [], ["the source of pass 'odd_rank'"]]
    lossy = made_of(own.override({"model.loss": "helper_apart:loss:1"}), "gloo")
    assert {*lossy} - {*before} == {"the source of module 'helper_apart'"}
    (tmp_path / "helper_beside.py").write_text("VALUE = 3 +\n")  # cannot be read as Python any more
    with pytest.raises(WorkbenchError, match="the source of module 'helper_beside' was .* and is .* here.*: compile"):
        require_same(before, made_of(own, "gloo"), tmp_path)
    exec(OWN.format("Nowhere."), {"__name__": "nowhere"})
    with pytest.raises(WorkbenchError, match="the source of pass 'odd_rank' cannot be found: define it in a file"):
        made_of(own, "gloo")
    monkeypatch.setattr(folder, "PACKAGE", tmp_path)
    part = "the source of this package"
    assert made_of(tiny("llama3", 2, 1), "gloo")[part] != before[part]


@pytest.mark.nightly
def test_ranks_that_would_launch_other_collectives_are_refused(tmp_path):
    file = tmp_path / "odd_launches.py"
    file.write_text(OWN.format("Rank 1 reduces otherwise."))
    import_file(file)
    with pytest.raises(WorkbenchError, match="rank 1 would run .*reduce_scatter"):
        compile_recipe(tiny("llama3", 2, 1, passes=["odd_rank"]), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["odd_launches.py"]


def test_a_disk_that_fills_leaves_nothing(tmp_path):
    with (pytest.raises(WorkbenchError, match="out: the artifact cannot be written: File too large$"),
          new_folder(tmp_path / "out") as part, files_of_at_most(4096)):
        (part / "program_0.pt").write_bytes(bytes(10_000))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_written_to(capsys):
    assert main(["compile", "llama3", "--out", "."]) == 2
    assert ". exists already: remove it, or give another folder" in capsys.readouterr().err


REHEARSED = '''
import workbench
from workbench_lessons.l08_replay_with_cudagraphs.replay_rehearsal import Rehearsal
from workbench.passes.cudagraph import CudagraphOptions, cudagraph, replayed


def after_one(before, after, options):
    """What `replayed` says."""
    return replayed(before, after, CudagraphOptions(warmup=1))


@workbench.register_pass("rehearsed", stage="replay", numerics="exact", effect=after_one)
def rehearsed(body, example_inputs, *, options):
    """On a CPU, what `cudagraph` does on a GPU."""
    body.step.recorder = body.step.recorder or Rehearsal()
    return cudagraph(body, example_inputs, options=CudagraphOptions(warmup=1))
'''


def test_a_step_that_is_replayed_trains_as_a_build_does(tmp_path, pool2):
    """The ranks make the replay: it is nowhere in the files."""
    file = tmp_path / "rehearsed_pair.py"
    file.write_text(REHEARSED)
    import_file(file)
    recipe = tiny("llama3", 2, 1, training__steps=4, passes=["rehearsed"])
    compile_recipe(recipe, tmp_path / "out", world="gloo")
    reports = trained(recipe, tmp_path / "out", pool2, verify=False)
    assert_bitwise(*reports)
    effects = [report.pass_row("rehearsed").verdict("effect") for report in reports]
    assert [effect.outcome for effect in effects] == [Outcome.PASS] * 2
    assert effects[0].evidence["replays"] == [3, 3]
    # as many inputs at fixed addresses, and as many copied; the replicas of gradients take one replay more
    same = [effect.evidence | {"replays": None} for effect in effects]
    assert same[0] == same[1]


def test_what_one_gpu_cannot_compile_is_refused(tmp_path, monkeypatch):
    for name in ("resolve", "check_buildable"):
        monkeypatch.setattr(all_ranks, name, lambda *_: None)
    recipe = tiny("llama3", 1, 2, passes=["async_tensor_parallel"])
    with pytest.raises(WorkbenchError, match="'async_tensor_parallel' reserves memory that GPUs share"):
        compile_recipe(recipe, tmp_path / "out", world="nccl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize(("name", "changes"), [
    ("llama3_full_inductor_block_bucketing_cudagraph", {}),
    ("llama3_whole_step", {"passes": ["transformer_block_bucketing", "full_inductor_compilation", "cudagraph"]}),
    ("llama3_flex_block_bucketing_regional_cudagraph", {"data__seq_len": 256}),
])
def test_two_gpus_train_as_a_build_does(name, changes, tmp_path):
    """One GPU compiles for both."""
    recipe, out = tiny(name, 2, 1, training__steps=6, **changes), tmp_path / "out"
    assert len(compile_recipe(recipe, out, world="nccl").ranks) == 2
    with ranks(2, backend="nccl", timeout=280, echo="none") as pool:
        loaded, built = trained(recipe, out, pool)
    assert torch.allclose(torch.tensor(loaded.training.losses), torch.tensor(built.training.losses), rtol=1e-5)
    effect = loaded.pass_row("cudagraph").verdict("effect")
    assert effect is not None and effect.outcome is Outcome.PASS and min(effect.evidence["replays"]) > 0


@pytest.mark.multi_gpu(2)
def test_no_kernel_is_compiled_or_tuned_at_load(tmp_path):
    recipe = tiny("llama3_full_inductor_block_bucketing", 2, 1, training__deterministic=False)
    compile_recipe(recipe, tmp_path / "out", world="nccl")
    for carried in (True, False):  # without its kernels, all are compiled
        with ranks(2, backend="nccl", timeout=200, echo="none") as pool:
            counts = pool.run(compilations, tmp_path / "out", tmp_path / str(carried), carried)
        assert all((built == tuned == 0) if carried else (built and tuned) for built, tuned in counts), counts


def compilations(artifact: Path, cache: Path, carried: bool) -> tuple[int, int]:
    """How many kernels this rank compiled, and how many it tuned, from loading the artifact to the end of a step."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from workbench import author, current_world
    from workbench.recipe.recipe import parse_recipe
    from workbench.torch_api.inductor.carried import install_kernels

    world, manifest, tuned = current_world(), read_manifest(artifact), list[str]()
    rank = world.rank
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / str(rank))
    os.environ.pop("TRITON_CACHE_DIR", None)
    timed = CachingAutotuner.benchmark_all_configs

    def noted(self: Any, *args: Any, **keywords: Any) -> Any:
        tuned.append(self.fn.__name__)
        return timed(self, *args, **keywords)

    if carried:
        install_kernels(artifact / "kernels", rank)
    with mock.patch.object(CachingAutotuner, "benchmark_all_configs", noted):
        authored = author(parse_recipe(manifest.recipe, "test"), world)
        step = load_step(authored, read_program(artifact / f"program_{manifest.ranks[rank]}.pt", world.device.index))[0]
        step(*step.pair.authored.example_batch()).backward()
    here, there = (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), artifact / "kernels")
    built = {path.parts[-2:] for path in here.rglob("*.cubin")}
    return len(built - {path.parts[-2:] for path in there.rglob("*.cubin")} if carried else built), len(tuned)
