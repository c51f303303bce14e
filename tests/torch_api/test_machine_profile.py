"""A measured machine: its file, what is interpolated from it, and who uses it."""

import json
from importlib import import_module

import pytest
import torch

from workbench import WorkbenchError
from workbench.torch_api.devices.profile import MACHINES, _along, _between, device_spec, load_profile
from workbench.torch_api.devices.specs import DEVICES, EFFICIENCY
from workbench.torch_api.inductor.bucketing import scheduler_times
from workbench.torch_api.supported import cpu_name


def profile(**changes):
    """A machine whose every matmul runs at 1e9 FLOP/ms, but for the largest at 2e9."""
    sides = (64, 256)
    rows = [{"dtype": "float32", "m": m, "k": k, "n": n, "ms": 2 * m * k * n / (2e9 if m * k * n == 256**3 else 1e9)}
            for m in sides for k in sides for n in sides]
    attention = {"dtype": "float32", "heads": 8, "length": 128, "dim": 64}
    return {
        "format_version": 1, "device": "cpu", "command": "by hand",
        "machine": {"gpus": [], "cores": 2, "cpu": cpu_name()},
        "versions": {"torch": torch.__version__}, "matmuls": rows,
        "attentions": [{**attention, "backward": False, "ms": 1.0}, {**attention, "backward": True, "ms": 3.0}],
        "moves": [{"bytes": 1000, "ms": 0.5}, {"bytes": 3000, "ms": 1.0}],
        "collectives": [{"kind": "all_gather", "ranks": 2, "bytes": 100, "ms": 0.1},
                        {"kind": "all_gather", "ranks": 2, "bytes": 300, "ms": 0.5}],
        "launch_us": 5.0, **changes}


@pytest.fixture
def spec(tmp_path):
    def made(**changes):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(profile(**changes)), encoding="utf-8")
        return device_spec(str(path))

    return made


def test_times_come_from_the_file_and_from_the_data_sheet_where_it_has_none(spec):
    found, sheet = spec(), DEVICES["cpu"]
    assert found.name == "mine" and found.trust == "error unknown"
    flop = 2 * 64**3
    assert found.product_ms(flop, 64, 64, torch.float32) == pytest.approx(flop / 1e9)
    assert found.product_ms(flop, 64, 64, torch.bfloat16) == sheet.product_ms(flop, 64, 64, torch.bfloat16)
    assert found.attention_ms(4 * 8 * 128**2 * 64, 128, 64, False, torch.float32) == pytest.approx(1.0)
    assert found.attention_ms(10 * 8 * 128**2 * 64, 128, 64, True, torch.float32) == pytest.approx(3.0)
    assert found.moving_ms(2000) == pytest.approx(0.75)
    assert found.sending_ms("all_gather", 2, 200) == pytest.approx(0.3)
    assert found.sending_ms("all_reduce", 2, 200) == sheet.sending_ms("all_reduce", 2, 200)
    assert found.launching_us(compiled=True) == found.launching_us(compiled=False) == (5.0, 0.0)  # an older file
    newer = spec(wrapper_us=9.0, view_us=2.0)
    assert newer.launching_us(compiled=True) == (9.0, 0.0) and newer.launching_us(compiled=False) == (5.0, 2.0)
    assert sheet.launching_us(compiled=True) == (0.0, 0.0)
    assert spec(errors={"compute": 0.04}).trust == "compute within 4% as a median"


def test_figures_name_another_machine_or_torch_of_their_file_and_a_laptop_simulates_any(spec, monkeypatch):
    patch = ".".join([*torch.__version__.split(".")[:2], "99"])  # is as fast
    for cpu, version, told in [(cpu_name(), "2.99.1", "with torch 2.99.1, and this is "), (cpu_name(), patch, ""),
                               ("Abacus", torch.__version__, "error unknown, calibrated on Abacus with ")]:
        found = spec(machine={"gpus": [], "cores": 2, "cpu": cpu}, versions={"torch": version}).trust
        assert told in found and (found == "error unknown") == (not told)
    laptop = device_spec("h200x2").trust
    assert laptop == "compute within 4% and exposure within 33% as a median"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert device_spec("h200x2").trust == (
        f"{laptop}, calibrated on NVIDIA H200 with torch 2.11.0+cu130, and this is NVIDIA H100 with torch "
        f"{torch.__version__}")


def test_between_the_measured_sizes_rates_change_gradually(spec):
    found = spec()
    rates = [2 * n**3 / found.product_ms(2 * n**3, n, n, torch.float32) for n in (64, 128, 256, 999)]
    assert rates == pytest.approx([1e9, rates[1], 2e9, 2e9]) and 1e9 < rates[1] < 2e9
    assert _between({(1, 1): 2.0, (4, 4): 8.0}, (2, 2)) == pytest.approx(4.0)  # two of four corners are unknown
    rows = ((10.0, 1.0), (20.0, 3.0))
    assert [_along(rows, at) for at in (1, 10, 15, 20, 40)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_a_file_that_is_no_profile_is_refused_by_name(spec, tmp_path):
    for changes, told in [({"format_version": 2}, "mine.json: format_version: missing, .* measure the machine again"),
                          ({"matmuls": []}, "matmuls"), ({"device": "abacus"}, "device 'abacus': one of h100")]:
        with pytest.raises(WorkbenchError, match=told):
            spec(**changes)
    (tmp_path / "torn.json").write_text('{"format_version": 1', encoding="utf-8")
    with pytest.raises(WorkbenchError, match=r"torn.json: the whole file: .* not as `workbench calibrate` writes it"):
        device_spec(str(tmp_path / "torn.json"))
    with pytest.raises(WorkbenchError, match="unknown device 'abacus': one of h100.*h200x1"):
        device_spec("abacus")


def test_the_machines_of_the_package_can_be_read():
    paths = sorted(MACHINES.glob("*.json"))
    for path in paths:
        gpu, count = path.stem.split("x")
        known, found, large = load_profile(path), device_spec(path.stem), 2 * 8192**3
        assert known.device == gpu and len(known.machine["gpus"]) == int(count)
        assert all(name.lower().startswith(f"nvidia {gpu}") for name in known.machine["gpus"])
        at_the_peak = EFFICIENCY * DEVICES[gpu].product_ms(large, 8192, 8192, torch.bfloat16)
        assert 0.5 < at_the_peak / found.product_ms(large, 8192, 8192, torch.bfloat16) < 1.0


# And Inductor's scheduler, which is given our times

@pytest.mark.compat
def test_inductors_scheduler_takes_the_times_it_is_given_and_is_as_before_afterwards():
    modules = [import_module(f"torch._inductor.fx_passes.{name}")
               for name in ("overlap_scheduling", "node_runtime_estimation")]
    before = [dict(vars(m)) for m in modules]
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    with pytest.raises(ZeroDivisionError), scheduler_times(lambda node, size: 7.0 if node is product else 0.0):
        assert modules[0].benchmark_node_with_cache_key(product, None) == (7.0, None)
        raise ZeroDivisionError
    assert [dict(vars(m)) for m in modules] == before
