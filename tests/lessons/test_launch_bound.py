"""Launches against work: the estimate, at sizes where it is known who waits for whom."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import WorkbenchError
from workbench.graph.read.simulated_run import simulated
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import paced


def graph(size: int, products: int = 4) -> fx.GraphModule:
    """A chain of square matmuls, each through a transpose, which starts nothing."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.empty(size, size, device="meta")
    for _ in range(products):
        turned = made.call_function(torch.ops.aten.t.default, (x,))
        x = made.call_function(torch.ops.aten.mm.default, (turned, turned))
        turned.meta["val"] = x.meta["val"] = torch.empty(size, size, device="meta")
    made.output((x,))
    return fx.GraphModule({}, made)


def test_replayed_each_graph_is_one_launch():
    both = {"forward": graph(8), "backward": graph(8)}
    found = paced(both, launch_us=5, replayed=True)
    assert (found.launches, found.cpu_us) == (2, 10)
    assert found.step_us < paced(both, launch_us=5).step_us


def test_a_timeline_charges_launches_and_a_replay_does_not():
    both = {"forward": graph(8), "backward": graph(8)}
    alone, launched, replayed = (simulated(both, "h200x1"), simulated(both, "h200x1", launch_us=5),
                                 simulated(both, "h200x1", launch_us=5, replayed=True))
    assert launched.total_ms == pytest.approx(8 * 5e-3 + launched.spans[-1].ms)
    assert alone.total_ms < replayed.total_ms < launched.total_ms
    assert launched.compute_ms == pytest.approx(alone.compute_ms)
    assert [span.begin for span in launched.spans] == pytest.approx([5e-3 * i for i in range(1, 9)])


def test_a_timeline_charges_views_in_which_the_cpu_launches_nothing():
    gm = make_fx(lambda x: torch.relu(torch.relu(x.view(-1)).view(8, 8)), tracing_mode="fake")(torch.ones(8, 8))
    found = simulated({"step": gm}, launch_us=5, view_us=2)
    assert [span.begin for span in found.spans] == pytest.approx([7e-3, 14e-3])


def test_a_launch_that_was_not_measured_and_time_that_runs_backwards_are_refused():
    with pytest.raises(WorkbenchError, match="device 'h100' has no measured launch: give launch_us, or a machine"):
        paced({"step": graph(8)})

    with pytest.raises(WorkbenchError, match=r"launch_us=-1, view_us=0.0: the time of a launch must be 0 or more"):
        paced({"step": graph(8)}, launch_us=-1)
