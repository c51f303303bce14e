"""offload_activations: the same bits, less saved on the device, copies that compute hides, and every fault told."""

import re
from unittest.mock import Mock

import pytest
import torch
from on_ranks import FSDP_TP, build_with, calls, outcomes, small
from passes.conftest import captured_once, through  # noqa: F401

from workbench import PassSpec, WorkbenchError, author, facts_of, run_partitioned
from workbench.checks.lint import lint
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import module_path, output_values
from workbench.graph.read.peak import live_bytes
from workbench.graph.read.simulated_run import simulated
from workbench.lab.offload_activations.transform import on_the_host, require_device
from workbench.pipeline.measured_run import Kernel, run_of_kernels
from workbench.pipeline.report import memory_of
from workbench.pipeline.run_passes import copy_graph
from workbench.pipeline.step_profile import step_profile
from workbench.torch_api.devices import host_copies
from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.torch_api.ops import host_copy

pytestmark = pytest.mark.integration
NAME = "offload_activations"
TO_HOST, TO_DEVICE, WAIT = "workbench.to_host", "workbench.to_device", "workbench.wait_copy"


def offload(**options):
    return PassSpec(name=NAME, options={"choose": "all", "min_bytes": 0} | options)


@pytest.fixture(scope="module")
def two_layers(fake4):
    return author(small(FSDP_TP, layers=2), fake4)


@pytest.fixture(scope="module")
def offloaded(two_layers, through):  # noqa: F811
    """The record of the pass on llama3 of two layers, every tensor sent that can be, and the pair."""
    records, pair, _ = through(two_layers, (), [offload()])
    return records[NAME], pair


def test_the_device_saves_less_and_holds_a_tensor_until_its_copy_has_ended(offloaded):
    record, pair = offloaded
    told = record.verdict("effect")
    was, now = told.evidence["saved_bytes"]
    assert told.outcome == "PASS" and was - now == told.evidence["bytes"] > 0
    assert told.evidence["offloaded"] == told.evidence["could_leave"] == len(calls(pair.backward, TO_DEVICE))
    assert sum(row.held_bytes for row in saved_tensors(*pair.graphs)) == now == memory_of(record)[1]["saved"]
    before, after = memory_of(record)
    assert after["peak_backward"] < before["peak_backward"]
    later = copy_graph(pair.forward)
    for wait in calls(later, WAIT):
        later.graph.output_node().prepend(wait)
    assert live_bytes(later).peak_bytes > live_bytes(pair.forward).peak_bytes


def test_copies_are_held_to_the_order_and_one_that_starts_late_fails_it(offloaded):
    record, pair = offloaded
    chosen = facts_of(pair.forward).step.order
    assert record.verdict("order").outcome == "PASS" and any("to_device" in name for name in chosen.hidden)
    assert {span.lane for span in simulated(pair.by_part).collectives} >= {"to_host", "to_device"}
    late = copy_graph(pair.backward)
    for start in calls(late, TO_DEVICE):
        min(start.users).prepend(start)
    found = chosen.kept_after((pair.forward, late), "the graph")
    assert found.outcome == "FAIL" and "backward to_device" in found.message
    assert chosen.kept_after(pair.graphs, "the graph").outcome == "PASS"


def unwaited(gm):
    for wait in calls(gm, WAIT):
        wait.replace_all_uses_with(wait.args[0])
        gm.graph.erase_node(wait)


def written_meanwhile(gm):
    start = calls(gm, TO_HOST)[0]
    with gm.graph.inserting_after(start):
        made = gm.graph.call_function(torch.ops.aten.zero_.default, (start.args[0],))
    made.meta["val"] = start.args[0].meta["val"]


def test_lint_finds_a_copy_without_its_wait(offloaded):
    for fault, part, said in [(unwaited, 0, "host copy to_host.* is read by output without a wait"),
                              (unwaited, 1, "host copy to_device.* without a wait"),
                              (written_meanwhile, 0, "the input of host copy to_host.* is written by")]:
        graph = copy_graph(offloaded[1].graphs[part])
        assert lint([graph], [graph]).outcome == "PASS"
        fault(graph)
        found = lint([offloaded[1].graphs[part]], [graph])
        assert found.outcome == "FAIL" and re.search(said, found.message)


def test_the_effect_finds_a_tensor_that_is_still_held_or_does_not_come_back(offloaded):
    record, pair = offloaded
    forward, backward = map(copy_graph, pair.graphs)
    output, values = forward.graph.output_node(), output_values(forward)
    start = calls(forward, TO_HOST)[0]
    with forward.graph.inserting_before(output):
        view = forward.graph.call_function(torch.ops.aten.alias.default, (start.args[0],))
    view.meta["val"] = start.args[0].meta["val"].view(-1)
    first = facts_of(forward).step.results
    place = next(i for i, v in enumerate(values) if i >= first and v.name.startswith("primals"))
    output.args = (tuple(view if i == place else v for i, v in enumerate(values)),)
    found = on_the_host(record.before, (forward, pair.backward), record.options)
    assert not found.happened and "in the same memory, is still saved on the device" in found.reason
    start = calls(backward, TO_DEVICE)[0]
    for wait in list(start.users):
        wait.replace_all_uses_with(start.args[0])
        backward.graph.erase_node(wait)
    backward.graph.erase_node(start)
    assert not on_the_host(record.before, (pair.forward, backward), record.options).happened


def test_it_says_why_nothing_was_sent(two_layers, through):  # noqa: F811
    for options, said in [({"min_bytes": 1 << 40}, "tensors has 1,099,511,627,776 bytes: set min_bytes lower"),
                          ({"modules": ("nowhere",)}, "tensors belongs to nowhere")]:
        told = through(two_layers, (), [offload(**options)])[0][NAME].verdict("effect")
        assert told.outcome == "NO_EFFECT" and said in told.message


def test_modules_and_hidden_choose_among_the_tensors(two_layers, through, offloaded):  # noqa: F811
    pair = through(two_layers, (), [offload(modules=("layers.*.feed_forward",))])[1]
    sent = calls(pair.forward, TO_HOST)
    assert sent and all(".feed_forward" in module_path(n) for n in sent)
    pair = through(two_layers, (), [offload(choose="hidden")])[1]
    spans = [span for span in simulated({"forward": pair.forward}, fused=True).spans if span.lane == "to_host"]
    assert 0 < len(spans) < len(calls(offloaded[1].forward, TO_HOST))
    assert sum(span.exposed for span in spans) < 0.05 * sum(span.ms for span in spans)


def test_what_cannot_be_copied_is_refused(two_layers, through, monkeypatch):  # noqa: F811
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(2, device="meta")
    with pytest.raises(WorkbenchError, match="copies from CUDA GPUs, and these tensors are on meta"):
        require_device([node])
    pair = through(two_layers, (), [])[1]
    with (torch._functorch.config.patch(enable_activation_offloading=True),
          pytest.raises(WorkbenchError, match="enable_activation_offloading is on.*turn it off")):
        run_partitioned(pair, [offload()])
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("Cannot access accelerator device")))
    with pytest.raises(WorkbenchError, match="no pinned host memory: Cannot access"):
        host_copies.require_pinned()


def test_the_operators_keep_strides_and_have_fakes():
    """Those that the graph promises: Inductor may hand over a tensor that it has laid out otherwise."""
    x, promised = torch.randn(6, 4), (1, 6)
    with new_fake_mode() as mode:
        fake = host_copies.TO_HOST(mode.from_tensor(x), promised)
        back = host_copies.TO_DEVICE(fake, torch.device("cpu"))
        assert (fake.shape, fake.stride()) == (back.shape, back.stride()) == (x.shape, promised)
    host = host_copies.WAIT(host_copies.TO_HOST(x, promised), x)
    made = host_copies.WAIT(host_copies.TO_DEVICE(host, torch.device("cpu")), host)
    assert torch.equal(made, x) and made.stride() == promised and made.data_ptr() != x.data_ptr()
    assert host_copy(host_copies.TO_HOST) == "to_host" and host_copy(host_copies.WAIT) is None


SENT, BACK = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"


def test_a_profile_tells_copies_from_compute_and_a_measured_step_names_them(offloaded):
    spans = ("gemm", 0, 1000), (SENT, 500, 2000), ("Memcpy HtoD (Pageable -> Device)", 3000, 3500)
    found = step_profile([Kernel(name, 7, begin, end) for name, begin, end in spans])
    assert (found.kernels_ms, found.copies_ms, found.exposed_copies_ms, found.nccl_ms) == (1.5, 1.5, 1.0, 0.0)
    pair = offloaded[1]
    sent, back = calls(pair.forward, TO_HOST), calls(pair.backward, TO_DEVICE)
    kernels = [Kernel(SENT, 7, 10.0 * i, 10.0 * i + 5) for i in range(len(sent))]
    kernels += [Kernel(BACK, 8, 1e4 + 10.0 * i, 1e4 + 10.0 * i + 5) for i in range(len(back))]
    run = run_of_kernels([*kernels, Kernel("gemm", 1, 0.0, 12.0)], pair.by_part, "written by hand")
    assert {n.name for n in sent} == {s.name for s in run.collectives if s.part == "forward"}
    assert len(run.collectives) == len(sent) + len(back)
    assert run.collectives[0].exposed == 0 < run.collectives[1].exposed


def swapped(gm):
    """Two tensors of one shape come back in each other's place."""
    back = [wait for wait in calls(gm, WAIT) if host_copy(wait.args[0].target) == "to_device"]
    for one in back:
        for other in back:
            if one < other and one.meta["val"].shape == other.meta["val"].shape and one.args[0] < other:
                hosts = one.args[0].args[0], other.args[0].args[0]
                for wait, host in zip((one, other), reversed(hosts), strict=True):
                    wait.args[0].args, wait.args = (host, wait.args[0].args[1]), (wait.args[0], host)
                return gm
    return gm


def on_ranks():
    recipe = small({"dp_shard": 2}, passes=(offload().as_toml(),))
    built = build_with(recipe, "fault", swapped, stage="partitioned")
    verdicts = outcomes(built, NAME)
    assert verdicts["numerics"][0] == "PASS" and "bitwise" in verdicts["numerics"][1]
    assert verdicts["effect"][0] == "PASS" and "nothing is saved" in verdicts["effect"][1]
    assert outcomes(built, "fault")["numerics"][0] == "FAIL"


@pytest.mark.ranks
def test_on_ranks_the_bits_stay_and_tensors_in_each_others_place_are_found(pool2):
    pool2.run(on_ranks)
