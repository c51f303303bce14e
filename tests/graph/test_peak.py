"""Bytes alive in node order, and the predicted peak of a step."""

import pytest
import torch
from graphs_by_hand import trace, two_layer_graph
from on_ranks import FSDP4, small

from workbench import author, capture, partition
from workbench.graph.read.peak import live_bytes, step_peak
from workbench.pipeline.run_passes import run_joint, saved_bytes

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def authored(fake4):
    return author(small(FSDP4).override({"data.seq_len": 256}), fake4)


@pytest.fixture(scope="module")
def pairs(authored):
    joint = capture(authored)
    full = joint.fork()
    run_joint(full, ["inductor_decomposition"])
    return {"plain": partition(joint), "decomposed": partition(full)}


def test_the_backward_holds_the_peak_with_all_that_is_saved_and_what_lives_across_steps(authored, pairs):
    shards = sum(p.to_local().nbytes for p in authored.module.parameters())
    buffers = sum(b.to_local().nbytes if hasattr(b, "to_local") else b.nbytes for b in authored.module.buffers())
    found = step_peak(pairs["plain"].graphs, fused=False)
    assert found.resident == 3 * shards + buffers  # and the optimizer's two states
    assert found.phase == "backward" and found.bytes > found.resident + saved_bytes(pairs["plain"])
    assert len(found.holders) == 10 and found.holders[0][1] == max(size for _, size, _ in found.holders)
    assert found.holders[0][0] in str(found)


def test_a_compiler_lowers_the_peak_and_recorded_graphs_raise_it(pairs):
    plain, decomposed = pairs["plain"].graphs, pairs["decomposed"].graphs
    assert step_peak(decomposed, fused=True).bytes < step_peak(decomposed, fused=False).bytes
    assert step_peak(plain, fused=False, replayed=True).bytes > step_peak(plain, fused=False).bytes


def test_what_no_other_kernel_reads_takes_no_memory():
    gm = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: (x + 1) * 2, tracing_mode="fake")(torch.empty(1000, dtype=torch.float32))
    assert [live_bytes(gm, fused=fused).peak_bytes for fused in (False, True)] == [3 * 4000, 2 * 4000]


def test_each_value_is_freed_after_its_last_use_and_each_storage_counts_once(fake4):
    chain = live_bytes(trace(lambda x: ((x + 1) * 2) - 3, torch.ones(1000)))
    assert (chain.input_bytes, chain.holders[0][1]) == (4000, 4000)
    assert chain.peak_bytes == 4000 + 2 * 4000, "input, one operand and its result"
    views = trace(lambda x: (x * 2).view(10, 100).t().contiguous().sum(), torch.ones(1000))
    assert live_bytes(views).peak_bytes == 4000 + 4000 + 4000


def test_a_backward_graph_frees_what_it_was_given(fake4):
    def step(saved, tangent):
        return (saved * tangent).exp().exp()

    kept = live_bytes(trace(step, torch.ones(1000), torch.ones(1000)))
    backward = trace(step, torch.ones(1000), torch.ones(1000), graph="backward")
    assert (kept.peak_bytes, live_bytes(backward).peak_bytes) == (16_000, 12_000)
    assert live_bytes(backward, keeps_saved=True).peak_bytes == 16_000


def test_holders_are_all_that_is_alive_at_the_peak(fake4):
    found = live_bytes(two_layer_graph(), holders=1000)
    assert sum(size for _, size, _ in found.holders) == found.peak_bytes == max(found.curve)


def test_an_item_of_a_tuple_lives_from_the_tuple_to_its_own_last_use(fake4):
    def forward(x):
        out, mean, _ = torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)
        total = out.sum()
        return [mean, total + torch.ones(8192, device=x.device).sum()]

    profile = live_bytes(trace(forward, torch.randn(1024, 8)))
    at = profile.nodes.index("native_layer_norm")
    assert profile.curve[at] == 32768 + 32768 + 4096 + 4096  # the input and all three
    assert profile.curve[profile.nodes.index("ones")] == 32768 + 4096 + 4 + 32768  # out and rstd are gone
