"""offload_activations: the same bits, less saved on the device, copies that compute hides, and every fault told."""

from __future__ import annotations

import re

import pytest
import torch
from on_ranks import build_with, calls, outcomes, small
from torch import nn

from workbench import WorkbenchError, as_backend, run_partitioned
from workbench.checks import order
from workbench.checks.lint import lint
from workbench.graph.facts import facts_of
from workbench.graph.read.memory import live_bytes, saved_tensors
from workbench.graph.read.nodes import module_path, output_values
from workbench.graph.read.simulated_run import simulated
from workbench.lab.offload_activations.copies import can_leave
from workbench.lab.offload_activations.transform import _require_device, on_the_host
from workbench.pipeline.measured_run import Kernel, run_of_kernels
from workbench.pipeline.run_passes import copy_graph
from workbench.pipeline.step_profile import step_profile
from workbench.recipe.contracts import check_passes
from workbench.recipe.sections import PassSpec
from workbench.torch_api.devices import host_copies
from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.torch_api.ops import host_copy

pytestmark = pytest.mark.integration
NAME = "offload_activations"
TO_HOST, TO_DEVICE, WAIT = "workbench.to_host", "workbench.to_device", "workbench.wait_copy"


def offload(**options):
    return PassSpec(name=NAME, options={"choose": "all", "min_bytes": 0} | options)


@pytest.fixture(scope="module")
def offloaded(two_layers, through):
    """The record of the pass on llama3 of two layers, every tensor sent that can be, and the pair."""
    records, pair, _ = through(two_layers, (), [offload()])
    return records[NAME], pair


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)).t().contiguous().t()
        return x.square().sum()


def test_gradients_are_bitwise_the_same():
    torch.manual_seed(0)
    module, x, found = Layers(), torch.randn(8, 8), []
    for passes in ([], [offload()]):
        module.zero_grad(set_to_none=True)
        backend = as_backend(passes, strict=True)
        torch.compile(module, backend=backend, dynamic=False)(x).backward()
        found.append([p.grad.clone() for p in module.parameters()])
        torch._dynamo.reset()
    assert backend.records[0].verdict("effect").evidence["offloaded"] >= 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_device_saves_less_by_what_was_sent(offloaded):
    record, pair = offloaded
    told = record.verdict("effect")
    was, now = told.evidence["saved_bytes"]
    assert told.outcome == "PASS" and was - now == told.evidence["bytes"] > 0
    assert told.evidence["offloaded"] == told.evidence["could_leave"] == len(calls(pair.backward, TO_DEVICE))
    assert sum(row.held_bytes for row in saved_tensors(*pair.graphs)) == now
    before, after = record.memory
    assert after["saved"] == now and after["peak_backward"] < before["peak_backward"]
    assert after["peak_forward"] <= before["peak_forward"]


def test_a_tensor_counts_until_its_copy_has_ended_and_not_longer(offloaded):
    forward = copy_graph(offloaded[1].forward)
    profile = live_bytes(forward)
    for wait in calls(forward, WAIT):
        forward.graph.output_node().prepend(wait)
    forward.recompile()
    assert live_bytes(forward).peak_bytes > profile.peak_bytes


def test_copies_are_held_to_the_order(offloaded):
    record, pair = offloaded
    chosen = record.verdict("order")
    kept = facts_of(pair.forward).step.order
    assert chosen.outcome == "PASS" and any("to_device" in name for name in kept.hidden)
    assert {span.lane for span in simulated(pair.by_part).collectives} >= {"to_host", "to_device"}


def late(gm):
    """Each copy back starts right in front of its wait."""
    for start in calls(gm, TO_DEVICE):
        min(start.users).prepend(start)
    gm.recompile()
    return gm


def test_a_copy_that_starts_late_fails_the_order(offloaded):
    pair = offloaded[1]
    graphs = tuple(copy_graph(gm) for gm in pair.graphs)
    late(graphs[1])
    chosen = facts_of(pair.forward).step.order
    found = order.kept_after(chosen, graphs, "the graph")
    assert found.outcome == "FAIL" and "backward to_device" in found.message
    assert order.kept_after(chosen, pair.graphs, "the graph").outcome == "PASS"


def unwaited(gm):
    for wait in calls(gm, WAIT):
        wait.replace_all_uses_with(wait.args[0])
        gm.graph.erase_node(wait)


def behind_its_reader(gm):
    wait = calls(gm, WAIT)[0]
    wait.next.append(wait)
    min(wait.users).append(wait)


def written_meanwhile(gm):
    start = calls(gm, TO_HOST)[0]
    with gm.graph.inserting_after(start):
        made = gm.graph.call_function(torch.ops.aten.zero_.default, (start.args[0],))
    made.meta["val"] = start.args[0].meta["val"]


@pytest.mark.parametrize(("fault", "part", "said"), [
    (unwaited, 0, "host copy to_host.* is read by output without a wait"),
    (unwaited, 1, "host copy to_device.* without a wait"),
    (behind_its_reader, 1, "malformed"),
    (written_meanwhile, 0, "the input of host copy to_host.* is written by"),
])
def test_lint_finds_a_copy_without_its_wait(offloaded, fault, part, said):
    graph = copy_graph(offloaded[1].graphs[part])
    assert lint([graph], [graph]).outcome == "PASS"
    fault(graph)
    found = lint([offloaded[1].graphs[part]], [graph])
    assert found.outcome == "FAIL" and re.search(said, found.message)


def test_the_effect_finds_a_tensor_that_is_still_held_on_the_device(offloaded):
    record, pair = offloaded
    forward = copy_graph(pair.forward)
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


def test_the_effect_finds_a_tensor_that_does_not_come_back(offloaded):
    record, pair = offloaded
    backward = copy_graph(pair.backward)
    start = calls(backward, TO_DEVICE)[0]
    for wait in list(start.users):
        wait.replace_all_uses_with(start.args[0])
        backward.graph.erase_node(wait)
    backward.graph.erase_node(start)
    assert not on_the_host(record.before, (pair.forward, backward), record.options).happened


@pytest.mark.parametrize(("options", "said"), [
    ({"min_bytes": 1 << 40}, "tensors has 1,099,511,627,776 bytes: set min_bytes lower"),
    ({"modules": ("nowhere",)}, "tensors belongs to nowhere"),
    ({"choose": "hidden", "device": "cpu"}, ""),
])
def test_it_says_why_nothing_was_sent(two_layers, through, options, said):
    told = through(two_layers, (), [offload(**options)])[0][NAME].verdict("effect")
    assert said in told.message and (told.outcome == "NO_EFFECT" or not said)


def test_modules_choose_among_the_tensors(two_layers, through):
    pair = through(two_layers, (), [offload(modules=("layers.*.feed_forward",))])[1]
    sent = calls(pair.forward, TO_HOST)
    assert sent and all(".feed_forward" in module_path(n) for n in sent)


def test_hidden_copies_end_before_the_forward_does(two_layers, through):
    pair = through(two_layers, (), [offload(choose="hidden")])[1]
    every = through(two_layers, (), [offload()])[1]
    sent = [span for span in simulated({"forward": pair.forward}, fused=True).spans if span.lane == "to_host"]
    assert 0 < len(sent) < len(calls(every.forward, TO_HOST))
    assert sum(span.exposed for span in sent) < 0.05 * sum(span.ms for span in sent)


def test_a_view_and_a_result_stay_on_the_device(two_layers, through):
    pair = through(two_layers, (), [])[1]
    found = can_leave(pair.forward)
    results = facts_of(pair.forward).step.results
    assert found and not set(output_values(pair.forward)[:results]) & set(found.values())
    assert all(n.op == "call_function" for n in found.values())


def test_another_device_than_a_gpu_or_a_cpu_is_refused():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2, device="meta")
    with pytest.raises(WorkbenchError, match="copies from CUDA GPUs, and these tensors are on meta"):
        _require_device({0: node})


def test_beside_torchs_own_offloading_it_is_refused(two_layers, through):
    pair = through(two_layers, (), [])[1]
    with (torch._functorch.config.patch(enable_activation_offloading=True),
          pytest.raises(WorkbenchError, match="enable_activation_offloading is on.*turn it off")):
        run_partitioned(pair, [offload()])


def test_a_host_without_pinned_memory_is_refused(monkeypatch):
    def none(*_, **keywords):
        raise RuntimeError("Cannot access accelerator device")

    monkeypatch.setattr(torch, "empty", none)
    with pytest.raises(WorkbenchError, match="no pinned host memory: Cannot access"):
        host_copies.require_pinned()


def test_it_stands_behind_the_passes_that_move_collectives():
    assert "must come before" in check_passes([], [NAME, "transformer_block_bucketing"])[0]


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


def test_a_profile_tells_copies_from_compute():
    found = step_profile([("gemm", 0, 1000), (SENT, 500, 2000), ("Memcpy HtoD (Pageable -> Device)", 3000, 3500)])
    assert (found.kernels_ms, found.copies_ms, found.exposed_copies_ms, found.nccl_ms) == (1.5, 1.5, 1.0, 0.0)
    assert "host copies 1.5 ms, 1.0 ms of it exposed" in str(found)


def test_a_measured_step_names_the_copies(offloaded):
    pair = offloaded[1]
    sent, back = len(calls(pair.forward, TO_HOST)), len(calls(pair.backward, TO_DEVICE))
    kernels = [Kernel(SENT, 7, 10.0 * i, 10.0 * i + 5) for i in range(sent)]
    kernels += [Kernel(BACK, 8, 1e4 + 10.0 * i, 1e4 + 10.0 * i + 5) for i in range(back)]
    found = run_of_kernels([*kernels, Kernel("gemm", 1, 0.0, 12.0)], pair.by_part, "written by hand")
    names = {f"{s.part} {s.name}": s for s in found.collectives}
    assert {n.name for n in calls(pair.forward, TO_HOST)} == {s.name for s in names.values() if s.part == "forward"}
    assert len(names) == sent + back and found.collectives[0].exposed == 0 < found.collectives[1].exposed


def on_ranks(fault):
    recipe = small({"dp_shard": 2}, passes=(offload().as_toml(),))
    found = build_with(recipe, "fault", swapped if fault else lambda gm: gm, stage="partitioned")
    return {name: outcomes(found, name) for name in (NAME, "fault")}


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


@pytest.mark.ranks
def test_on_ranks_the_bits_stay_and_the_effect_says_that_a_cpu_saves_nothing(pool2):
    for found in pool2.run(on_ranks, False):
        outcome, message = found[NAME]["numerics"]
        assert outcome == "PASS" and "bitwise" in message
        assert found[NAME]["effect"][0] == "PASS" and "nothing is saved" in found[NAME]["effect"][1]


@pytest.mark.ranks
def test_numerics_finds_tensors_that_come_back_in_each_others_place(pool2):
    assert pool2.run(on_ranks, True)[0]["fault"]["numerics"][0] == "FAIL"
