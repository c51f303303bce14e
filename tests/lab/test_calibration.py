"""`workbench calibrate`: what it measures, on CPU ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import load_recipe
from workbench.cli import main
from workbench.graph.read.simulated_run import simulated
from workbench.lab.calibration import measure
from workbench.pipeline.stages import before_lowering
from workbench.torch_api.devices.profile import device_spec, load_profile

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):
    """Notes each operator, with the shapes of its tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append((operator.__name__, *(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))))
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def measured(monkeypatch):
    """The operators of each measured call; in place of the clock, an operator takes a millisecond."""
    calls = []

    def counted(call, device, repeats=0):
        with Operators() as operators:
            call()
        calls.append(operators.seen)
        return float(len(operators.seen))

    monkeypatch.setattr(measure, "window_ms", counted)
    return calls


def test_each_row_names_the_call_that_was_measured(measured, monkeypatch):
    monkeypatch.setitem(measure.SIDES, "cpu", (16, 2048))
    rows = list(measure.matmuls(CPU))
    assert len(rows) == 8 - 4  # in float32, products with at most one large side
    assert measured == [[("mm.out", (row.m, row.k), (row.k, row.n))] for row in rows]
    monkeypatch.setitem(measure.MOVED, "cpu", (12, 22))
    small, large = measure.moves(CPU)
    assert measured[-2:] == [[("add.out", (2**11,), (2**11,))], [("add.out", (2**21,), (2**21,))]]
    assert (small.bytes, large.bytes) == (3 * 2**12, 3 * 2**22)
    measured.clear()
    monkeypatch.setitem(measure.LENGTHS, "cpu", (64,))
    for row, seen in zip(list(measure.attentions(CPU)), measured, strict=True):
        attention, = (name for name, *_ in seen if "dot_product" in name)
        assert ("backward" in attention) is row.backward


def test_the_cpu_time_of_an_operator_is_that_of_a_chain_by_its_length(measured):
    assert measure.launch_us(CPU) == measure.view_us(CPU) == 1e3
    launches, views = ({name for name, *_ in measured[at]} for at in (0, -1))
    assert launches == {"mm.default", "silu.default", "mul.Tensor", "add.Tensor"}
    assert views == {"view.default", "t.default"}


def test_a_kernel_of_inductors_code_costs_what_one_more_adds_to_a_chain(monkeypatch):
    monkeypatch.setattr(measure, "LINKS", (4, 24))
    links = []
    monkeypatch.setattr(torch, "compile", lambda chain, **options: lambda x, weights: links.append(len(weights)))

    def window_ms(call, device, repeats):
        call()
        return 2.0 + 0.1 * links[-1]  # of the whole call, and of each link, which is two kernels

    monkeypatch.setattr(measure, "window_ms", window_ms)
    assert measure.wrapper_us(CPU) == pytest.approx(50) and set(links) == {4, 24}


@pytest.mark.nightly  # half a minute
def test_a_profile_of_two_ranks_serves_as_a_device(tmp_path, fake4, capsys):
    path = tmp_path / "mine.json"
    assert main(["calibrate", str(path), "--ranks", "2"]) == 0
    page = (Path(__file__).parents[2] / "docs/lab/calibration.md").read_text()
    (shown,) = re.findall(r"^(mine\.json: .+)$", page, re.MULTILINE)
    printed = capsys.readouterr().out.replace(str(tmp_path), "").strip("/\n")
    assert re.sub(r"\d+ cores, .+?, torch \S+:", "", printed) == re.sub(r"\d+ cores, .+?, torch \S+:", "", shown)
    profile = load_profile(path)
    assert device_spec(str(path)).host_gbps == profile.host_gbps
    assert profile.device == "cpu" and profile.replay_us is None and profile.wrapper_us
    assert "--ranks 2" in profile.command
    assert {row.kind for row in profile.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 4, "model.n_layers": 1})
    pair = before_lowering(recipe, fake4)
    run = simulated(pair.by_part, str(path))
    assert run.source == "simulated on mine, error unknown" and run.compute_ms > 0
