from importlib import import_module

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.torch_api.devices.estimators import scheduler_times
from workbench.torch_api.devices.profile import device_spec
from workbench.torch_api.devices.specs import DeviceSpec

MINE = DeviceSpec("mine", {"float32": 1.0, "bfloat16": 2.0}, 1000.0, 10.0, 1.0)


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


def test_unknown_devices_are_refused():
    with pytest.raises(WorkbenchError, match="unknown device 'h900': one of h100, .*, cpu, h100x2.*, h200x1.*, a file"):
        device_spec("h900")
    assert device_spec(MINE) is MINE
