"""What a traced forward assigns: noted for buffers, numbers and texts, and not where a tensor is written in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.torch_api.side_effects import SideEffect, noted_side_effects


class Net(nn.Module):
    def __init__(self, step) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4))
        self.inner.register_buffer("other", torch.ones(4))
        self.inner.calls, self.inner.seen, self.inner.counts, self.step = 0, [], [0], step
        self.inner.by_name, self.inner.before = {}, None

    def forward(self, x):
        self.step(self.inner, x)
        return x * self.inner.mean


def rebinds(m, x):
    m.mean = m.mean + x


def counts(m, x):
    m.calls += 1


def names(m, x):
    m.last = "x"


def writes(m, x):
    m.mean = m.mean.mul_(0.9)
    m.other.add_(x)


def writes_out(m, x):
    m.mean = torch.add(m.other, x, out=m.mean)


def keeps(m, x):
    m.seen.append(x)
    m.last = x


def counts_in_a_list(m, x):
    m.counts[0] += 1


def counts_by_name(m, x):
    m.by_name["calls"] = 1


def registers(m, x):
    m.register_buffer("late", x + 1)


def reads_the_last(m, x):
    x if m.before is None else x + m.before
    m.before = x


@pytest.mark.parametrize(("step", "found"), [
    (counts_in_a_list, SideEffect("inner", "counts", False)), (counts_by_name, SideEffect("inner", "by_name", False)),
    (registers, SideEffect("inner", "late", True)), (reads_the_last, SideEffect("inner", "before", False)),
    (rebinds, SideEffect("inner", "mean", True)), (counts, SideEffect("inner", "calls", False)),
    (names, SideEffect("inner", "last", False)), (writes, None), (writes_out, None), (keeps, None),
])
def test_what_a_forward_assigns(step, found):
    torch._dynamo.reset()
    with noted_side_effects() as effects:
        torch._dynamo.functional_export.dynamo_graph_capture_for_export(Net(step))(torch.ones(4))
    assert effects == ([found] if found else [])
