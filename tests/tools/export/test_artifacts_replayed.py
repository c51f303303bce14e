"""Artifacts whose step is replayed, and those for GPUs: what only the ranks can make is made at load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tools.export.test_artifacts import resealed, tiny
from workbench import Recipe, WorkbenchError, compile_recipe, run, run_artifact
from workbench.checks.verdicts import Outcome
from workbench.cli import main
from workbench.tools.export import compiled, loaded
from workbench.tools.export.artifact import read
from workbench.tools.export.compiled import transform
from workbench.tools.export.run_once import run_once
from workbench.tools.own_files import import_file
from workbench.torch_api import aot
from workbench.world.fake import fake_world
from workbench.world.ranks import RankPool, ranks

pytestmark = [pytest.mark.integration, pytest.mark.ranks]  # with test_artifacts, whose artifact they copy
REHEARSED = '''
import workbench
from workbench.graph.replay_rehearsal import Rehearsal
from workbench.passes.cudagraph import CudagraphOptions
from workbench.passes.cudagraph import cudagraph, replayed


def after_one(before, after, options):
    """What `replayed` says."""
    return replayed(before, after, CudagraphOptions(warmup=1))


@workbench.register_pass("rehearsed", stage="replay", numerics="exact", effect=after_one)
def rehearsed(body, example_inputs, *, options):
    """On a CPU, what `cudagraph` does on a GPU."""
    body.step.recorder = body.step.recorder or Rehearsal()
    return cudagraph(body, example_inputs, options=CudagraphOptions(warmup=1))
'''
CUDAGRAPHS = ("llama3_full_inductor_block_bucketing_cudagraph", "llama3_block_bucketing_cudagraph")


@pytest.fixture
def rehearsed(tmp_path: Path) -> str:
    """The name of a user pass that replays on a CPU."""
    file = tmp_path / f"rehearsed_in_{tmp_path.name}.py"
    file.write_text(REHEARSED)
    import_file(file)
    return "rehearsed"


@pytest.mark.parametrize("step", ["pair", pytest.param("whole", marks=pytest.mark.nightly)])
def test_a_step_that_is_replayed_trains_as_a_build_does(step: str, rehearsed: str, tmp_path: Path,
                                                        pool2: RankPool) -> None:
    recipe = tiny("llama3", mesh__dp_shard=2, mesh__tp=1, training__step=step, training__steps=4, passes=[rehearsed])
    made = compile_recipe(recipe, tmp_path / "out", world="gloo")
    assert not any((tmp_path / "out").rglob("*replay*")) and made.passes[-1]["name"] == rehearsed
    ours = run_artifact(tmp_path / "out", world=pool2, progress=False)
    theirs = run(recipe, world=pool2, progress=False)
    assert ours.training is not None and theirs.training is not None
    assert (ours.training.losses, ours.training.norms) == (theirs.training.losses, theirs.training.norms)
    assert ours.start_seconds is not None and theirs.start_seconds is not None
    mine, built = (report.pass_row(rehearsed).verdict("effect") for report in (ours, theirs))
    assert mine.outcome is built.outcome is Outcome.PASS
    assert mine.evidence["replays"] == ([3, 3] if step == "pair" else [3])
    assert mine.evidence == built.evidence  # as many inputs at fixed addresses, and as many copied


@pytest.mark.parametrize("step", ["pair", pytest.param("whole", marks=pytest.mark.nightly)])
def test_every_body_runs_once_on_zeros_in_the_layout_of_its_inputs(step: str) -> None:
    seen: list[list[tuple[Any, ...]]] = []
    with fake_world(2) as world:
        made = transform(tiny("llama3", mesh__dp_shard=2, mesh__tp=1, training__step=step), world)
        graphs = made.split.graphs

        def noted(graph: Any) -> Any:
            body = aot.boxed(graph)

            def call(args: list[Any]) -> Any:
                seen.append([(a.shape, a.stride(), a.dtype) for a in args if isinstance(a, torch.Tensor)])
                return body(args)

            return call

        run_once(graphs, [noted(graph) for graph in graphs])
    wanted = [[(v.shape, v.stride(), v.dtype) for n in graph.graph.find_nodes(op="placeholder")
               if isinstance(v := n.meta.get("val"), torch.Tensor)] for graph in graphs]
    assert seen == wanted and len(seen) == (2 if step == "pair" else 1)


def test_an_artifact_of_another_kind_of_ranks_is_refused(mine: Path, pool2: RankPool) -> None:
    resealed(mine, world="nccl")
    with pytest.raises(WorkbenchError, match=r"copy is compiled for GPUs, and this pool has gloo: give ranks\(n, back"):
        run_artifact(mine, world=pool2, progress=False)
    if not torch.cuda.is_available():
        with pytest.raises(WorkbenchError, match="device was .* and is no CUDA GPU here: compile the recipe again, he"):
            run_artifact(mine, progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_is_needed_to_compile_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["compile", "llama3", "--world", "nccl", "--out", str(tmp_path / "out")]
    assert main(line) == 2 and "world nccl needs GPUs, and no CUDA GPU can be used here" in capsys.readouterr().err
    assert main(["compile", CUDAGRAPHS[0], "--out", str(tmp_path / "out")]) == 2
    assert "pass 'cudagraph' needs CUDA" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_memory_that_gpus_share_cannot_be_reserved_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("refuse_nccl", "check_buildable"):
        monkeypatch.setattr(compiled, name, lambda *_: None)
    recipe = tiny("llama3", mesh__dp_shard=1, mesh__tp=2, passes=["async_tensor_parallel"])
    with pytest.raises(WorkbenchError, match="'async_tensor_parallel' reserves memory that GPUs share"):
        compile_recipe(recipe, tmp_path / "out", world="nccl")


def _on_gpus(recipe: Recipe, out: Path) -> None:
    """An artifact that one GPU compiled trains on two as a build does, which takes the kernels of the artifact."""
    made = compile_recipe(recipe, out, world="nccl")
    assert made.world == "nccl" and len(made.ranks) == 2
    with ranks(2, backend="nccl", timeout=280, echo="none") as pool:
        ours = run_artifact(out, world=pool, verify=True, progress=False)
        theirs = run(recipe, world=pool, progress=False)
    assert ours.training is not None and theirs.training is not None
    assert torch.allclose(torch.tensor(ours.training.losses), torch.tensor(theirs.training.losses), rtol=1e-5)
    if "cudagraph" in recipe.pass_names:
        found = ours.pass_row("cudagraph").verdict("effect")
        assert found.outcome is Outcome.PASS and min(found.evidence["replays"]) > 0


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("name", ["llama3_block_bucketing", *CUDAGRAPHS, "llama3_whole_step"])
def test_two_gpus_train_as_a_build_does(name: str, tmp_path: Path) -> None:
    _on_gpus(tiny(name, mesh__dp_shard=2, mesh__tp=1, training__steps=6), tmp_path / "out")


@pytest.mark.multi_gpu(2)
def test_one_recording_of_the_whole_step_comes_from_an_artifact(tmp_path: Path) -> None:
    passes = ["transformer_block_bucketing", "full_inductor_compilation", "cudagraph"]
    _on_gpus(tiny("llama3_whole_step", mesh__dp_shard=2, mesh__tp=1, training__steps=6, passes=passes),
             tmp_path / "out")


@pytest.mark.multi_gpu(2)
def test_regions_with_flex_attention_come_from_an_artifact(tmp_path: Path) -> None:
    _on_gpus(tiny("llama3_flex_block_bucketing_regional_cudagraph", mesh__dp_shard=2, mesh__tp=1, data__seq_len=256,
                  training__steps=6), tmp_path / "out")


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("carried", [True, False], ids=["with its kernels", "without them"])
def test_no_kernel_is_compiled_or_tuned_at_load(carried: bool, tmp_path: Path) -> None:
    recipe = tiny("llama3_full_inductor_block_bucketing", mesh__dp_shard=2, mesh__tp=1, training__deterministic=False)
    compile_recipe(recipe, tmp_path / "out", world="nccl")
    with ranks(2, backend="nccl", timeout=200, echo="none") as pool:
        counts = pool.run(compilations, tmp_path / "out", tmp_path / "cache", carried)
    assert all((built == tuned == 0) if carried else (built and tuned) for built, tuned in counts), counts


def compilations(folder: Path, cache: Path, carried: bool) -> tuple[int, int]:
    """How many kernels this rank compiled, and how many it tuned, from loading the artifact to the end of a step."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from workbench import author, current_world
    from workbench.pipeline.train import Batches
    from workbench.recipe.recipe import parse_recipe

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / str(current_world().rank))
    os.environ.pop("TRITON_CACHE_DIR", None)
    made, tuned = read(folder), list[str]()
    authored = author(parse_recipe(made.recipe, "test"), current_world())
    timed = CachingAutotuner.benchmark_all_configs

    def noted(self: Any, *args: Any, **keywords: Any) -> Any:
        tuned.append(self.fn.__name__)
        return timed(self, *args, **keywords)

    place = loaded.install_kernels if carried else lambda *_: None
    with (mock.patch.object(CachingAutotuner, "benchmark_all_configs", noted),
          mock.patch.object(loaded, "install_kernels", place)):
        step, _ = loaded.load_step(authored, folder, made)
        step(*Batches(authored).at(0)).backward()
    here, there = (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), folder / "kernels")
    built = {path.parts[-2:] for path in here.rglob("*.cubin")}
    return len(built - {path.parts[-2:] for path in there.rglob("*.cubin")} if carried else built), len(tuned)
