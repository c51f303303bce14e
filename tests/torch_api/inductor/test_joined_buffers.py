"""Inductor lets nothing write over a concatenation: without this, what reads one of its parts reads other values."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from graphs_by_hand import C10D, group_name, trace
from on_ranks import calls
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

from workbench.torch_api.inductor.joined_buffers import joined_kept


def sums(x):
    part = x.exp()
    joined = torch.cat([part, x]).view(2, -1)
    return C10D.wait_tensor(C10D.all_reduce(joined, "sum", group_name())), part + 1


def alone(x):
    return C10D.wait_tensor(C10D.all_reduce(x.exp(), "sum", group_name()))


@pytest.mark.compat
@pytest.mark.parametrize(("function", "guard", "written"), [
    (sums, joined_kept, 0), (sums, nullcontext, 1),  # the second is the fault
    (alone, joined_kept, 1),
], ids=["joined", "joined, unguarded", "alone"])
def test_an_all_reduce_over_a_concatenation_gets_a_buffer_of_its_own(fake4, function, guard, written):
    gm = trace(function, torch.ones(4))
    with guard():
        reinplace_inplaceable_ops_core(gm.graph)
    assert len(calls(gm, "_c10d_functional.all_reduce_")) == written
