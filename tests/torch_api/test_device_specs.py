import os
from importlib import import_module
from pathlib import Path

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.torch_api.devices.estimators import device_specs
from workbench.torch_api.devices.profile import device_spec
from workbench.torch_api.devices.specs import DeviceSpec

MM = torch.ops.aten.mm
MINE = DeviceSpec("mine", {"float32": 1.0, "bfloat16": 2.0}, 1000.0, 10.0, 1.0)


def estimates(dtype=torch.bfloat16):
    """(matmul ns, transfer ns) as Inductor's scheduler would see them."""
    module = import_module("torch.utils._runtime_estimation")
    a = torch.empty(1000, 1000, device="meta", dtype=dtype)
    return module.get_compute_time(MM, (a, a), {}, a, {dtype}), module.get_transfer_time([a, a], [a])


@pytest.mark.compat
def test_inductor_estimates_for_the_device_on_every_torch():
    with device_specs(MINE):
        compute, transfer = estimates()
        single, _ = estimates(torch.float32)
    assert compute == pytest.approx(1e9 / (0.75 * 2e12) * 1e9)
    assert single == pytest.approx(2 * compute)
    assert transfer == pytest.approx(3 * 2e6 / 1000.0)


@pytest.mark.compat
def test_everything_is_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/of-the-user")
    modules = [import_module(m) for m in ("torch.utils._runtime_estimation", "torch._inductor.utils",
                                          "torch._inductor.scheduler", "torch._inductor.comm_analysis",
                                          "torch._inductor.fx_passes.overlap_scheduling", "torch.utils.flop_counter")]
    before = [dict(vars(m)) for m in modules]
    with pytest.raises(ZeroDivisionError), device_specs("h100"):
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        assert folder != "/tmp/of-the-user" and any(dict(vars(m)) != b for m, b in zip(modules, before, strict=True))
        raise ZeroDivisionError
    assert [dict(vars(m)) for m in modules] == before
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/tmp/of-the-user" and not Path(folder).exists()


@pytest.mark.compat
def test_estimates_of_one_run_are_not_found_by_the_next():
    overlap = import_module("torch._inductor.fx_passes.overlap_scheduling")
    with device_specs("h100"):
        overlap.set_cached_node_time("planted", 123.0)
        assert overlap.get_cached_node_time("planted") == 123.0
        with device_specs("a100"):
            assert overlap.get_cached_node_time("planted") is None
    with device_specs("h100"):
        assert overlap.get_cached_node_time("planted") is None


def test_unknown_devices_are_refused():
    with pytest.raises(WorkbenchError, match="unknown device 'h900': one of h100, .*, cpu, h100x2.*, h200x1.*, a file"):
        device_spec("h900")
    assert device_spec(MINE) is MINE
