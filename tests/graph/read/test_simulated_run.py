"""The spans of a simulated step add up to the scheduler's own figures, and say why a collective is exposed."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from workbench import WorkbenchError, device_spec
from workbench.graph.read.simulated_run import BEHIND_OTHERS, COMPUTE, HIDDEN, TAKEN, simulated
from workbench.graph.read.timeline import costs_of, simulate


@pytest.fixture(scope="module")
def record(tour):
    """That of the bucketing."""
    return tour.records[-1]


def test_spans_add_up_to_the_schedulers_figures(record):
    for gm in (*record.before, *record.after):
        run, other = simulated(gm), simulate(gm.graph.nodes, costs_of(gm, "h100"))
        assert run.exposed_ms == pytest.approx(other.exposed_ms)
        assert run.compute_ms == pytest.approx(other.compute_ms)
        assert len(run.collectives) == len(costs_of(gm, "h100").collective)
        for lane in run.lanes:  # one thing at a time on each
            mine = sorted((s.begin, s.end) for s in run.spans if s.lane == lane)
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(mine))


def test_forward_and_backward_follow_one_another(record):
    run = simulated(dict(zip(record.parts, record.after, strict=True)))
    first = max(s.end for s in run.spans if s.part == "forward")
    assert min(s.begin for s in run.spans if s.part == "backward") >= first - 1e-9
    assert run.lanes[0] == COMPUTE and {"dp_shard", "dp_shard.gather", "tp"} == set(run.lanes[1:])


def test_exposed_or_hidden_and_by_what_it_is_limited(record):
    limits = {s.limit for s in simulated(record.before[0]).collectives}
    assert limits == {"nothing computes between its start and its wait"}
    after = simulated(record.after[0]).collectives
    assert BEHIND_OTHERS in {s.limit for s in after}
    assert all((s.exposed == 0) == (s.limit in (HIDDEN, BEHIND_OTHERS)) for s in after)
    slow = replace(device_spec("h100"), link_gbps=0.5, latency_us=0.1)  # bytes, and not starts, take the time
    assert "its bytes over the link" in {s.limit for s in simulated(record.after[1], slow).collectives}
    assert "latency" in {s.limit for s in simulated(record.after[1]).collectives}


@pytest.mark.parametrize(("product_first", "limit"), [(True, HIDDEN), (False, BEHIND_OTHERS)])
def test_hidden_behind_a_product_or_behind_another_collective(product_first, limit):
    """The gather of b starts first and is waited for last: between are a product, or the exposed gather of a."""
    graph = torch.fx.Graph()
    values = {}

    def node(target, *args, shape):
        made = graph.call_function(target, args)
        made.meta["val"] = torch.empty(shape, device="meta")
        return made

    for name, shape in (("a", (64, 64)), ("b", (64, 64)), ("x", (2048, 2048))):
        values[name] = graph.placeholder(name)
        values[name].meta["val"] = torch.empty(shape, device="meta")
    ops = torch.ops._c10d_functional
    gathers = {name: node(ops.all_gather_into_tensor.default, values[name], 2, group, shape=(128, 64))
               for name, group in (("b", "1"), ("a", "0"))}
    if product_first:
        node(torch.ops.aten.mm.default, values["x"], values["x"], shape=(2048, 2048))
    waits = [node(ops.wait_tensor.default, gathers[name], shape=(128, 64)) for name in ("a", "b")]
    graph.output(tuple(waits))
    spec = replace(device_spec("h100"), latency_us=5.0)
    run = simulated(torch.fx.GraphModule({}, graph), spec)
    (of_b,) = [s for s in run.collectives if s.lane == "1"]
    assert of_b.limit == limit and of_b.exposed == 0
    assert run.fates() == ("2 of 2 collectives hidden behind compute" if product_first else
                           "0 of 2 collectives hidden behind compute and 1 behind exposed ones")
    held = simulated(torch.fx.GraphModule({}, graph), replace(spec, product_delays=1.0))
    assert (TAKEN in {s.limit for s in held.collectives}) is product_first
    assert (held.exposed_ms > run.exposed_ms) is product_first


def test_a_trace_for_perfetto(record, tmp_path):
    run = simulated(record.after[0])
    events = json.loads(run.to_perfetto(tmp_path / "step.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(run.spans)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(run.lanes)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(run.total_ms * 1e3, abs=0.01)


def test_a_graph_without_values_is_refused():
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    with pytest.raises(WorkbenchError, match="no node of the graph graph has"):
        simulated(torch.fx.GraphModule({}, graph))
