"""`workbench calibrate`: what it measures, on CPU ranks, and where it cannot write."""

from __future__ import annotations

import time

import pytest
import torch

from workbench import load_recipe
from workbench.cli import main
from workbench.graph.read.simulated_run import simulated
from workbench.pipeline.route import route, upto, walk
from workbench.tools.timing import calibrate
from workbench.torch_api.devices.profile import device_spec, load_profile

CPU = torch.device("cpu")


def test_each_figure_is_of_the_call_that_it_names(monkeypatch):
    monkeypatch.setitem(calibrate.SIDES, "cpu", (16, 2048))
    monkeypatch.setitem(calibrate.WINDOW, "cpu", 0.002)
    found = {(row.m, row.k, row.n): row.ms for row in calibrate.matmuls(CPU)}
    assert len(found) == 8 - 4  # in float32, products with at most one large side
    assert found[16, 16, 16] < found[16, 16, 2048]
    monkeypatch.setitem(calibrate.MOVED, "cpu", (12, 22))
    small, large = calibrate.moves(CPU)
    assert small.bytes == 3 * 2**12 and small.ms < large.ms
    monkeypatch.setitem(calibrate.LENGTHS, "cpu", (64,))
    forward, backward, *_ = calibrate.attentions(CPU)
    assert not forward.backward and backward.backward and forward.ms > 0
    assert 0 < calibrate.view_us(CPU) < calibrate.launch_us(CPU) < 1e4


def test_the_slower_way_of_a_copy_counts(monkeypatch):
    monkeypatch.setitem(calibrate.HOST_BYTES, "cpu", 10**6)
    taken = iter([0.5, 2.0])  # milliseconds, to the host and back
    monkeypatch.setattr(calibrate, "window_ms", lambda call, device: call() is not None and next(taken))
    assert calibrate.host_gbps(CPU) == pytest.approx(0.5)


def test_a_kernel_of_inductors_code_costs_what_one_more_adds_to_a_chain(monkeypatch):
    monkeypatch.setattr(calibrate, "LINKS", (4, 24))
    called = []

    def compiled(chain, **options):
        def run(x, weights):
            called.append(len(weights))
            time.sleep(2e-3 + len(weights) * 1e-4)  # of the whole call, and of each link, which is two kernels
            return chain(x, weights[:1])

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    assert calibrate.wrapper_us(CPU) == pytest.approx(50, rel=0.5) and set(called) == {4, 24}


@pytest.mark.nightly  # two compilations
def test_inductors_code_launches_in_microseconds():
    assert 0.1 < calibrate.wrapper_us(CPU) < 1e3


def test_it_says_where_it_cannot_write(tmp_path, capsys):
    assert main(["calibrate", str(tmp_path / "missing" / "mine.json")]) == 2
    assert "missing does not exist" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.nightly  # half a minute
def test_a_profile_of_two_ranks_serves_as_a_device(tmp_path, fake4):
    path = tmp_path / "mine.json"
    assert main(["calibrate", str(path), "--ranks", "2"]) == 0
    found = load_profile(path)
    assert found.host_gbps and device_spec(str(path)).host_known
    assert found.device == "cpu" and found.replay_us is None and found.wrapper_us and "--ranks 2" in found.command
    assert {row.kind for row in found.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 4, "model.n_layers": 1})
    stages = route(recipe, fake4)
    pair = walk(stages[: upto(stages, "partition") + 1]).pair
    run = simulated(pair.by_part, str(path))
    assert run.source == "simulated on mine, error unknown" and run.compute_ms > simulated(pair.by_part).compute_ms
