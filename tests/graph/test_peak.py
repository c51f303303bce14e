"""The predicted peak of a step."""

from __future__ import annotations

import pytest
import torch
from on_ranks import FSDP4, small

from workbench.authoring.author import author
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.graph.read.memory import live_bytes
from workbench.graph.saving.peak import step_peak
from workbench.pipeline.run_passes import run_joint, saved_bytes

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def authored(fake4):
    return author(small(FSDP4, layers=2).override({"data.seq_len": 256}), fake4)


@pytest.fixture(scope="module")
def pairs(authored):
    joint = capture(authored)
    full = joint.fork()
    run_joint(full, ["inductor_decomposition"])
    return {"plain": partition(joint), "decomposed": partition(full)}


def test_what_lives_across_steps_is_parameters_states_and_buffers(authored, pairs):
    shards = sum(p.to_local().nbytes for p in authored.module.parameters())
    buffers = sum(b.to_local().nbytes if hasattr(b, "to_local") else b.nbytes for b in authored.module.buffers())
    found = step_peak(pairs["plain"].graphs, fused=False)
    assert found.resident == 3 * shards + buffers


def test_the_backward_holds_the_peak_with_all_that_is_saved(pairs):
    found = step_peak(pairs["plain"].graphs, fused=False)
    assert found.phase == "backward" and found.bytes > found.resident + saved_bytes(pairs["plain"])
    assert len(found.holders) == 10 and found.holders[0][1] == max(size for _, size, _ in found.holders)
    assert found.holders[0][0] in str(found)


def test_a_fused_kernel_writes_only_what_others_read(pairs):
    graphs = pairs["decomposed"].graphs
    plain, fused = (step_peak(graphs, fused=each).bytes for each in (False, True))
    assert fused < plain


def test_recorded_graphs_keep_what_is_saved(pairs):
    graphs = pairs["plain"].graphs
    called, replayed = (step_peak(graphs, fused=False, replayed=each).bytes for each in (False, True))
    assert replayed > called
    assert max(live_bytes(graphs[1], keeps_saved=True).curve) > max(live_bytes(graphs[1]).curve)


def test_a_kernel_that_no_tensor_leaves_takes_no_memory():
    gm = torch.fx.experimental.proxy_tensor.make_fx(
        lambda x: (x + 1) * 2, tracing_mode="fake")(torch.empty(1000, dtype=torch.float32))
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert live_bytes(gm).peak_bytes == 3 * 4000
    assert live_bytes(gm, runs_at={first: first.next}, unwritten={first}).peak_bytes == 2 * 4000
