"""What the benchmarks refuse to take for a measured run, and that the peers do the same work."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import pytest
import torch

from workbench import load_recipe
from workbench.authoring.author import author
from workbench.graph.read.simulated_run import StepTimeline
from workbench.pipeline.train import total_norm
from workbench.recipe.recipe import Recipe
from workbench.torch_api.devices.profile import MACHINES, load_profile
from workbench.world.mesh import current_world

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import accuracy, soak, unequal_collectives
from benchmarks.peers import fsdp2
from benchmarks.step_time import finite

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_run_whose_loss_is_no_number_measures_nothing():
    assert finite([1.5, 0.25]) == ["0x1.8000000000000p+0", "0x1.0000000000000p-2"]
    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        finite([1.5, math.nan, math.inf])


EXPERTS = {"n_experts": 4, "n_groups": 1, "top_groups": 1, "dim": 32, "ffn_dim": 48, "expert_dim": 16, "n_layers": 2}


def eager_distances(described: Recipe) -> dict[str, float]:
    """Norm-relative distance of torch's own FSDP2 to ours: the loss, every gradient and their total norm."""
    world = current_world()
    ours = author(described, world)
    batch = ours.example_batch()
    peer = fsdp2(described, world)
    losses = []
    for module in (ours.module, peer):
        losses.append(module(*batch))
        losses[-1].backward()
    expected = {name: parameter.grad.full_tensor() for name, parameter in ours.module.named_parameters()}
    found = {"loss": abs(losses[1] / losses[0] - 1).item()}
    norms = [total_norm([p.grad for p in module.parameters()]) for module in (ours.module, peer)]
    found["norm"] = abs(norms[1] / norms[0] - 1).item()
    for name, parameter in peer.named_parameters():
        gradient = parameter.grad.full_tensor()
        found[name] = ((gradient - expected[name]).norm() / expected[name].norm()).item()
    assert len(found) == len(expected) + 2
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("mesh, model", [
    ({"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    ({"dp_shard": 2, "tp": 2, "ep": 2, "ep_over": "dp_shard x tp"}, {"dispatch": "capacity"}),
    ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}),
    *(pytest.param(*each, marks=pytest.mark.nightly) for each in (
        ({"dp_shard": 2, "tp": 2, "ep": 4, "ep_over": "dp_shard x tp"}, {}),
        ({"dp_shard": 4, "ep": 2}, {}),
        ({"dp_shard": 2, "tp": 2}, {"n_experts": 6}))),
], ids=str)
def test_fsdp2_with_experts_trains_what_ours_trains(pool4, mesh, model):
    given: dict[str, Any] = dict(
        name="test", mesh=mesh, model={"family": "deepseek_v3", **EXPERTS, **model}, data={"seq_len": 16},
        # FSDP2 divides what a group of one has reduced in float64 twice
        precision={"param": "float64", "reduce": "float32"},
    )
    for found in pool4.run(eager_distances, Recipe(**given)):
        assert max(found.values()) < 1e-6, found


@pytest.mark.nightly  # captures 16 layers
def test_a_committed_row_of_accuracy_is_what_the_simulator_says_now() -> None:
    found = json.loads((RESULTS / "accuracy_h200x1.json").read_text(encoding="utf-8"))
    row = next(row for row in found["rows"] if row["changes"]["data.seq_len"] == "512")
    (again,) = accuracy.compute_rows([row], found["device"])
    assert again["simulated_ms"] == pytest.approx(row["simulated_ms"], rel=0.01)
    assert again["error"] == pytest.approx(row["simulated_ms"] / row["kernels_ms"] - 1, abs=0.01)
    (other,) = accuracy.compute_rows([row], "h200")  # by the data sheet
    assert abs(other["error"]) > abs(again["error"])


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_a_machines_error_is_that_of_the_committed_rows(path: Path) -> None:
    errors = {}
    for what, name in (("compute", "accuracy"), ("exposure", "accuracy_exposed")):
        committed = RESULTS / f"{name}_{path.stem}.json"
        if committed.exists():
            rows = json.loads(committed.read_text(encoding="utf-8"))["rows"]
            assert what == "exposure" or len(rows) >= 12
            errors[what] = pytest.approx(median(
                abs(row["simulated_ms"] / (row["kernels_ms"] if what == "compute" else min(row["measured_ms"])) - 1)
                for row in rows), abs=5e-4)
    assert load_profile(path).errors == errors
    assert errors or path.stem in ("h100x4", "h200x4")  # of which no step was measured beside a simulated one


@pytest.mark.parametrize("device", ["h200x2", "h100x2"])
def test_lists_with_overlap_are_among_the_rows_of_exposure(device: str) -> None:
    found = json.loads((RESULTS / f"accuracy_exposed_{device}.json").read_text(encoding="utf-8"))
    assert sum("overlap_collectives" in row["passes"] for row in found["rows"]) >= 3
    assert found["ranking"] == accuracy.ranking(found["rows"], "step_ms", "simulated_step_ms")
    assert found["ranking"]["pairs"] >= 2 and not found["ranking"]["wrong"]


def test_two_of_three_steps_without_optimizer_are_simulated_within_a_tenth() -> None:
    """Not those of small experts, whose many short kernels take longer than any profile says."""
    found = json.loads((RESULTS / "accuracy_exposed_h100x2.json").read_text(encoding="utf-8"))
    errors = {row["recipe"]: abs(row["simulated_step_ms"] / row["step_ms"] - 1) for row in found["rows"]}
    assert not any(row["optimizer"] for row in found["rows"]) and len(found["rows"]) >= 12
    assert found["median_absolute_step_error"] < 0.1
    assert {name for name, error in errors.items() if error > 0.11} == {
        name for name in errors if name.startswith("deepseek_v3")}


def test_a_list_that_nothing_replays_is_left_out_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "simulated_step", lambda recipe, device: StepTimeline("on paper", (), 10.0, 9.0))
    measured = {"variant": "a", "passes": [], "exposed_nccl_ms": 2.0, "step_ms": 11.0}
    bare = load_recipe("llama3_tp")
    rows = [measured | {"recipe": bare.to_dict()}, measured | {"recipe": bare.to_dict(), "exposed_nccl_ms": 1.0},
            measured | {"recipe": bare.override({"passes": ["cudagraph"]}).to_dict()}]
    (row,), (left,) = accuracy.exposed_rows(rows, "h200x2")
    assert list(row["passes"]) == ["cudagraph"] and row["error"] == -1.0 and row["simulated_step_ms"] == 10.0
    assert not left["passes"] and left["why"].startswith("nothing replays it")


def test_the_ranking_of_lists_is_told_where_they_differ_and_a_wrong_one_is_named() -> None:
    def row(what: str, size: int, measured: float, simulated: float) -> dict[str, Any]:
        return {"recipe": f"llama3_{what}", "changes": {"data.seq_len": str(size), "passes": what},
                "kernels_ms": measured, "simulated_ms": simulated}

    rows = [row("a", 1, 10.0, 12.0), row("b", 1, 10.4, 11.0), row("c", 1, 20.0, 11.5), row("a", 2, 1.0, 99.0)]
    wrong = {"faster": "llama3_a", "slower": "llama3_c", "changes": {"data.seq_len": "1"}}
    assert accuracy.ranking(rows) == {"pairs": 2, "wrong": [wrong]}
    committed = json.loads((RESULTS / "accuracy_h200x1.json").read_text(encoding="utf-8"))
    assert committed["ranking"] == accuracy.ranking(committed["rows"])
    assert committed["ranking"]["pairs"] >= 8 and not committed["ranking"]["wrong"]


SOAK = {"pools": 300, "changes": 300, "cells": 1000, "restarts": 50}


def test_the_committed_soak_is_whole_and_flat() -> None:
    rows = json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))["rows"]
    assert {name: row["runs"] for name, row in rows.items()} == SOAK
    for row in rows.values():
        assert len(row["samples"]) == 10 and soak.grown(row["samples"]) == row["grown"] == []
        after, last = row["closed"], row["samples"][-1]
        assert all(after[name] <= last[name] for name in ("processes", "descriptors", "threads", "temporary_files"))
    assert rows["restarts"]["closed"]["processes"] == rows["pools"]["closed"]["processes"]


KEPT: list[Any] = []
LEAKS: dict[str, Callable[[Path], Any]] = {
    "memory_mb": lambda folder: bytearray(b"x") * 12_000_000,
    "descriptors": lambda folder: (folder / "held").open("w"),
    "threads": lambda folder: started_thread(),
    "processes": lambda folder: subprocess.Popen(  # which ends, and what it started lives on without a parent
        ["sh", "-c", "sleep 60 & exec sleep 0"], start_new_session=True),
    "temporary_files": lambda folder: (folder / str(len(KEPT))).touch(),
}
STOP = threading.Event()


def started_thread() -> threading.Thread:
    thread = threading.Thread(target=STOP.wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_seen(leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: None)
    monkeypatch.setenv(*soak.MARK.split("="))

    def runs(count: int, leaking: bool) -> Iterator[None]:
        for _ in range(count):
            if leaking:
                KEPT.append(LEAKS[leak](tmp_path))
            yield

    assert soak.soaked(lambda count: runs(count, False), 20)["grown"] == []
    try:
        found = soak.soaked(lambda count: runs(count, True), 20)
    finally:
        STOP.set()
        for each in KEPT:
            if isinstance(each, subprocess.Popen):
                each.wait()
                os.killpg(each.pid, signal.SIGKILL)
            elif hasattr(each, "close"):
                each.close()
        KEPT.clear()
        STOP.clear()
    assert any(said.startswith(leak) for said in found["grown"]), found


def test_five_of_five_unequal_jobs_went_the_same_way_on_gpus() -> None:
    """What lesson 10 says of NCCL: rank 0 leaves its barrier, and unequal dtypes give the bits that gloo gives."""
    found = json.loads((RESULTS / "unequal_collectives_h100x4.json").read_text(encoding="utf-8"))["runs"]
    assert [row["what"] for row in found] == 5 * ["hang"] + 5 * ["dtypes"] and {row["backend"] for row in found} == {
        "nccl"}
    assert all(row["returned"] == {"0": str([4.0] * 4)} for row in found[:5])
    bits = (torch.tensor([3.0]).view(torch.int32) + 1).tolist() * 2
    assert all(row["returned"]["0"] == str(bits) and set(row["returned"].values()) == {
        str(bits), str(torch.tensor(bits, dtype=torch.int32).view(torch.float32).tolist())} for row in found[5:])
    assert all("The ranks part" in row["report"] for row in found)


@pytest.mark.nightly
def test_ranks_that_sum_unequal_dtypes_return_and_are_reported() -> None:
    row = unequal_collectives.observed(unequal_collectives.dtypes, 2)
    assert row["backend"] == "gloo" and row["returned"] == {
        "0": "[1065353217, 1065353217]", "1": "[1.0000001192092896, 1.0000001192092896]"}
    assert "int32 [2]" in row["report"] and "float32 [2]" in row["report"]
