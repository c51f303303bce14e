"""Inductor's code calls kernels in the order of the graph, and a scheduler's pass that comes later is seen in it."""

from __future__ import annotations

import re

import pytest
import torch
from graphs_by_hand import C10D, DIM, gather, group_name, trace
from torch._inductor import comms, config

from workbench.torch_api.inductor.kept_order import graph_order
from workbench.torch_api.inductor.lowering import compile_inner
from workbench.torch_api.ops import op_name

CALLED = ("all_gather_into_tensor", "wait_tensor", "mm")
CALL = r"(?:_c10d_functional|extern_kernels)\.(\w+)(?:\.default)?\("


def one_hidden(shard_a, shard_b, x):
    """A gather that is over before the first product, and one that begins after it and ends behind the second.

    Inductor's passes would hide the first as well, or move the second next to its wait. Its sort would move the second
    up to `early`, with which `late` fuses.
    """
    early = x + 1
    a = gather(shard_a)
    square = x @ x
    begun = C10D.all_gather_into_tensor(shard_b, 4, group_name())
    cube = square @ x
    b = C10D.wait_tensor(begun)
    late = x * b
    return [x @ a, cube, early, late]


def graph_and_code():
    """The collectives, waits and products that the graph calls, and those that Inductor's code calls."""
    gm = trace(one_hidden, torch.randn(2, DIM), torch.randn(2, DIM), torch.randn(DIM, DIM))
    names = [op_name(n.target).partition(".")[2] for n in gm.graph.nodes]
    values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    with config.patch(force_disable_caches=True):
        compiled, _ = compile_inner(gm, values, is_backward=False, static=[], visible=4, config=graph_order(),
                                    build=False)
    return [name for name in names if name in CALLED], re.findall(CALL, compiled.source_code)


@pytest.mark.compat
def test_inductors_code_calls_what_the_graph_calls_in_its_order(fake4):
    graph, code = graph_and_code()
    assert code == graph


@pytest.mark.compat
@pytest.mark.parametrize("move", [comms.raise_comms, comms.sink_waits])
def test_a_pass_that_moves_kernels_later_is_seen_in_the_code(fake4, move):
    with config.patch(reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=[move]):
        graph, code = graph_and_code()
    assert code != graph and sorted(code) == sorted(graph)
