"""What a traced forward changes in Python: noted, and not where a tensor is written in place."""

from __future__ import annotations

import functools
import itertools
import random
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from workbench.torch_api.tracing.side_effects import SideEffect, noted_reads, noted_side_effects

SEEN, CALLS = [], 0


class Counted:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


class Net(nn.Module):
    def __init__(self, step) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4))
        self.inner.register_buffer("other", torch.ones(4))
        self.inner.calls, self.inner.seen, self.inner.counts, self.step = 0, [], [0], step
        self.inner.by_name, self.inner.before, self.inner.weight = {}, None, nn.Parameter(torch.ones(4))
        self.inner.ordered, self.inner.recent, self.inner.numbers = OrderedDict(), deque(maxlen=2), set()
        self.inner.count, self.inner.random, self.inner.counted = itertools.count(), random.Random(0), Counted()
        self.inner.array = np.zeros(4)

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
    m.last = x
    m.fresh = [x]


def appends(m, x):
    m.seen.append(x)


def empties(m, x):
    m.seen.append(x)
    m.seen.clear()


def remembers_keys(m, x):
    m.ordered[len(m.ordered)] = x


def shifts(m, x):
    m.recent.append(x)


def adds(m, x):
    m.numbers.add(1)


def takes(m, x):
    next(m.count)


def draws(m, x):
    m.random.random()


def calls(m, x):
    m.counted()


def changes_a_global(m, x):
    SEEN.append(x)


def counts_in_a_global(m, x):
    global CALLS
    CALLS += 1


def adds_to_an_array(m, x):
    m.array = m.array + 1


def writes_to_an_array(m, x):
    m.array[0] += 1


def asks_and_keeps(m, x):
    if not hasattr(m, "later"):
        m.later = x


def reads_a_gradient(m, x):
    if m.weight.grad is None:
        m.last = x


def sets_what_it_is(m, x):
    m.calls = 0


def counts_in_a_list(m, x):
    m.counts[0] += 1


def counts_by_name(m, x):
    m.by_name["calls"] = 1


def registers(m, x):
    m.register_buffer("late", x + 1)


def reads_the_last(m, x):
    x if m.before is None else x + m.before
    m.before = x


def asks_in_vars_and_keeps(m, x):
    if "later" not in vars(m):
        m.later = x


def asks_by_error_and_keeps(m, x):
    try:
        m.later + x
    except AttributeError:
        m.later = x


def drops_a_buffer(m, x):
    m.other = None


def swaps_buffers(m, x):
    m.mean, m.other = m.other, m.mean


@functools.cache
def cached():
    return []


@functools.cache
def cached_object():
    return Counted()


def appends_to_what_is_cached(m, x):
    cached().append(x)


def counts_in_what_is_cached(m, x):
    cached_object()()


def counts_on_a_weight(m, x):
    m.weight.calls = getattr(m.weight, "calls", 0) + 1


def reads_a_version(m, x):
    m.last = m.weight._version


def changes_a_setting(m, x):
    torch.set_default_dtype(torch.float64)


CHANGES = {
    counts_in_a_list: "counts", counts_by_name: "by_name", appends: "seen", remembers_keys: "ordered", shifts: "recent",
    adds: "numbers", takes: "count", draws: "random", calls: "counted",
    writes_to_an_array: "array",
}


@pytest.mark.parametrize(("step", "found"), [
    *[(step, SideEffect("inner", name, "contents")) for step, name in CHANGES.items()],
    (registers, SideEffect("inner", "late", "buffer")), (reads_the_last, SideEffect("inner", "before", "attribute")),
    (rebinds, SideEffect("inner", "mean", "buffer")), (counts, SideEffect("inner", "calls", "attribute")),
    (names, SideEffect("inner", "last", "attribute")), (adds_to_an_array, SideEffect("inner", "array", "attribute")),
    (asks_in_vars_and_keeps, SideEffect("inner", "later", "attribute")),
    (asks_by_error_and_keeps, SideEffect("inner", "later", "attribute")),
    (drops_a_buffer, SideEffect("inner", "other", "buffer")), (swaps_buffers, SideEffect("inner", "mean", "buffer")),
    (appends_to_what_is_cached, SideEffect("", "cached()", "outside")),
    (counts_in_what_is_cached, SideEffect("", "cached_object()", "outside")),
    (counts_on_a_weight, SideEffect("", "calls", "on tensor")),
    (reads_a_version, SideEffect("", "_version", "tensor")),
    (changes_a_setting, SideEffect("", "default_dtype", "setting")),
    (asks_and_keeps, SideEffect("inner", "later", "attribute")),
    (reads_a_gradient, SideEffect("", "grad", "tensor")),
    (changes_a_global, SideEffect("", "SEEN", "outside")),
    (counts_in_a_global, SideEffect("", "CALLS", "outside")),
    (writes, None), (writes_out, None), (keeps, None), (empties, None), (sets_what_it_is, None),
])
def test_what_a_forward_changes(step, found):
    torch._dynamo.reset()
    with noted_reads() as read, noted_side_effects(read) as effects:
        torch._dynamo.functional_export.dynamo_graph_capture_for_export(Net(step))(torch.ones(4))
    assert effects[:1] == ([found] if found else [])
