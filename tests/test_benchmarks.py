"""What the benchmarks refuse to take for a measured run, and that the peers do the same work."""

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from on_ranks import distances

from benchmarks import soak
from benchmarks.ablate import compared
from benchmarks.peers import fsdp2
from benchmarks.step_time import finite
from workbench import Recipe, author, current_world
from workbench.pipeline.train import total_norm
from workbench.torch_api.devices.profile import MACHINES, load_profile

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_a_difference_counts_where_the_bands_are_apart():
    base = [100.0, 110.0, 104.0]
    others = [base, [113.0, 112.0, 120.0], [130.0, 131.0, 132.0], [80.0, 81.0, 82.0], [50.0], []]
    assert [compared(steps, base) for steps in others] == [
        "", "within noise", "+27.0 ms", "-23.0 ms", "-54.0 ms, noise unknown", ""]


def test_a_run_whose_loss_is_no_number_measures_nothing():
    assert finite([1.5, 0.25]) == ["0x1.8000000000000p+0", "0x1.0000000000000p-2"]
    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        finite([1.5, math.nan, math.inf])


EXPERTS = {"family": "deepseek_v3", "dispatch": "capacity", "n_layers": 2, "n_experts": 4,
           "n_groups": 1, "top_groups": 1, "dim": 32, "ffn_dim": 48, "expert_dim": 16}


def eager_distances(described: Recipe) -> dict[str, float]:
    """Norm-relative distance of torch's own FSDP2 to ours: the loss, every gradient and their total norm."""
    world = current_world()
    ours = author(described, world)
    batch = ours.example_batch()
    results: list[dict[str, torch.Tensor]] = []
    for module in (ours.module, fsdp2(described, world)):
        loss = module(*batch)
        loss.backward()
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        gradients = {name: gradient.full_tensor() for name, gradient in grads.items()}
        norm = total_norm(list(grads.values()))
        results.append({"loss": loss.detach(), "norm": norm, **gradients})
    return distances(results[1], results[0])


@pytest.mark.ranks
def test_fsdp2_with_experts_trains_what_ours_trains(pool4):
    recipe: dict[str, Any] = {
        "name": "test", "model": EXPERTS, "data": {"seq_len": 16},
        "mesh": {"dp_shard": 2, "tp": 2, "ep": 2, "ep_over": "dp_shard x tp"},
        # FSDP2 divides what a group of one has reduced in float64 twice
        "precision": {"param": "float64", "reduce": "float32"},
    }
    for found in pool4.run(eager_distances, Recipe(**recipe)):
        assert max(found.values()) < 1e-6, found


def recorded_errors(machine: str) -> dict[str, Any]:
    """The median errors of the committed rows, which must be at least twelve of compute."""
    errors = {}
    for what, name in (("compute", "accuracy"), ("exposure", "accuracy_exposed")):
        committed = RESULTS / f"{name}_{machine}.json"
        if committed.exists():
            rows = json.loads(committed.read_text(encoding="utf-8"))["rows"]
            assert what == "exposure" or len(rows) >= 12
            errors[what] = pytest.approx(median(
                abs(row["simulated_ms"] / (row["kernels_ms"] if what == "compute" else min(row["measured_ms"])) - 1)
                for row in rows), abs=5e-4)
    return errors


def test_a_machines_error_is_that_of_the_committed_rows() -> None:
    paths = {path.stem: path for path in MACHINES.glob("*.json")}
    errors = {name: recorded_errors(name) for name in paths}
    assert {name: load_profile(path).errors for name, path in paths.items()} == errors
    # of two, no step was measured beside a simulated one
    assert sorted(name for name in errors if not errors[name]) == ["h100x4", "h200x4"]


def test_each_leak_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: None)
    monkeypatch.setenv(*soak.MARK.split("="))
    kept: list[Any] = []
    started: list[subprocess.Popen[bytes]] = []
    stop = threading.Event()
    orphans = ["sh", "-c", "sleep 60 & exec sleep 0"]  # what ends leaves another behind

    def leaks(count: int) -> Iterator[None]:
        for number in range(count):
            threading.Thread(target=stop.wait, daemon=True).start()
            kept.extend([bytearray(b"x") * 12_000_000, (tmp_path / str(number)).open("w")])
            started.append(subprocess.Popen(orphans, start_new_session=True))
            yield

    assert soak.soaked(lambda count: iter([None] * count), 20)["grown"] == []
    try:
        grown = soak.soaked(leaks, 20)["grown"]
    finally:
        stop.set()
        for process in started:
            process.wait()
            os.killpg(process.pid, signal.SIGKILL)
    # the leaked processes are small beside the session's ranks
    assert {said.split()[0] for said in grown} | {"started_mb"} == set(soak.sample())
