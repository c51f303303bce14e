"""Time under kernels, from spans written by hand."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile, record_function

from workbench.pipeline.step_profile import StepProfile, covered, profile_step, since, step_profile


def test_time_under_overlapping_spans_counts_once():
    assert covered([(0, 4), (2, 5), (8, 9), (8.5, 8.75)]) == 6


def test_exposed_is_what_no_compute_kernel_covers():
    spans = [("matmul", 0, 4000), ("ncclDevKernel_AllGather_RING_LL(x)", 3000, 6000), ("add", 5500, 7000),
             ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 1000, 2000)]
    by = {"AllGather": 1.5, "ReduceScatter": 0.0}
    found = step_profile([*spans, ("add", 6000, 6500)], 3)
    assert list(found.longest.items())[:2] == [("matmul", 4.0), ("ncclDevKernel_AllGather_RING_LL(x)", 3.0)]
    assert found.longest["add"] == 2.0
    found = step_profile(spans, 3)
    assert found == StepProfile(5.5, 4.0, 1.5, kernels=4, launches=3, exposed_by=by, longest=found.longest)
    assert str(step_profile(spans, 3)) == "kernels 5.5 ms, NCCL 4.0 ms, 1.5 ms of it exposed; 4 kernels in 3 launches"


def test_a_peer_copy_and_a_barrier_hide_no_collective():
    waiting = [("Memcpy PtoP (Device -> Device)", 0, 100), ("(anonymous namespace)::barrier_kernel(int)", 100, 150)]
    found = step_profile([("ncclDevKernel_AllGather_RING_LL(x)", 0, 100), *waiting, ("gemm", 140, 200)])
    assert (found.nccl_ms, found.exposed_nccl_ms, found.kernels_ms) == pytest.approx((0.15, 0.14, 0.06))


def test_what_ran_before_the_mark_does_not_count():
    x = torch.ones(4)
    with profile(acc_events=True) as seen:
        x.exp()
        with record_function("mark"):
            x.sin()
    names = {e.name for e in seen.events()}
    assert {"aten::exp", "aten::sin", "mark"} <= names
    assert {e.name for e in since(seen.events(), "mark") if e.name.startswith("aten")} == {"aten::sin"}


def test_a_measured_step_leaves_the_module_as_it_was(monkeypatch):
    module = torch.nn.BatchNorm1d(2)
    ran = []
    monkeypatch.setattr("workbench.pipeline.step_profile.profiled",
                        lambda step: (ran.append([step(), step()]) or [], []))
    profile_step(lambda: module(torch.randn(3, 2)).sum().backward(), module)
    assert len(ran) == 1 and int(module.num_batches_tracked) == 0 and module.running_mean.tolist() == [0, 0]
    assert module.weight.grad is None
