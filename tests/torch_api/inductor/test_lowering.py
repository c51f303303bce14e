"""What Inductor is told of a graph before it compiles it, and what it keeps of the graph."""

import re
from contextlib import nullcontext

import pytest
import torch
from graphs_by_hand import C10D, DIM, gather, group_name, trace
from on_ranks import calls
from torch._inductor import comms, config
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.torch_api.inductor.joined_buffers import joined_kept
from workbench.torch_api.inductor.kept_order import graph_order
from workbench.torch_api.inductor.kernels import seen
from workbench.torch_api.inductor.lowering import compile_inner, visible_outputs
from workbench.torch_api.ops import op_name


def test_a_gradient_that_is_none_is_not_a_visible_output() -> None:
    """A mesh has no gradient, and Inductor fails on None on a GPU."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((x, None, x, x))
    assert visible_outputs(GraphModule({}, graph), 3) == [0, 2]


# Inductor lets nothing write over a concatenation: without this, what reads one of its parts reads other values.

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


# What the forward of a whole step saves keeps nothing else alive: without this, a norm's weight kept its bucket.

def norm_in_a_bucket(x, weight):
    """A norm's weight and a product's come out of one buffer; the norm's is read again after the last product."""
    bucket = weight @ weight
    norm = bucket[0] * 2
    forward = (x * norm) @ (bucket + 1)
    return [(forward @ forward) * norm]


@pytest.mark.nightly
@pytest.mark.compat
@pytest.mark.parametrize("once", [True, False], ids=["computed once", "the fault"])
def test_a_small_part_does_not_keep_its_bucket(once):
    gm = make_fx(norm_in_a_bucket, tracing_mode="fake")(torch.ones(9, 9), torch.ones(9, 9))
    names = {n.name for n in gm.graph.nodes}
    norm = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[0].name
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    compiled, _ = compile_inner(gm, inputs, is_backward=False, static=[], visible=1, build=False,
                                config={"fx_graph_cache": False}, once={norm} if once else ())
    _, _, after = compiled.source_code.rpartition("extern_kernels.mm(")
    assert "cpp_fused" in after and bool(re.search(r"\bbuf0\b", after)) is not once
    called = [n for call in seen(compiled).calls for n in (*call.nodes, *call.others)]
    assert norm in called and not [n for n in called if n not in names]


# Inductor's code calls kernels in the order of the graph, and a scheduler's pass that comes later is seen in it.

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
def test_a_pass_that_moves_kernels_later_is_seen_in_the_code(fake4):
    moves = [comms.raise_comms]
    with config.patch(reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=moves):
        graph, code = graph_and_code()
    assert code != graph and sorted(code) == sorted(graph)
