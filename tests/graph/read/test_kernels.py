"""What is said of kernels: by node, in counts, and of nodes that are in none; compilations are made up."""

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.graph.facts import GraphFacts, set_facts
from workbench.graph.read.kernels import find_kernels

CODE = '''
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r"""
void kernel(const float* in, float* out) {}
""")
triton_1 = async_compile.triton('triton_1', """
def triton_1(): pass
""", device_str='cuda')
'''


def function(x, w):
    hidden = torch.relu(x @ w.t())
    return [torch.tanh(hidden).sum(), hidden.exp()]


@pytest.fixture(scope="module")
def graph():
    """Nodes t, mm, relu, tanh, sum_1, exp."""
    gm = make_fx(function, tracing_mode="fake")(torch.ones(2, 3), torch.ones(2, 3))
    set_facts(gm, GraphFacts("joint"))
    return gm


def made(graph, *calls, same=None, removed=(), missing=()):
    kept = {"format": 1, "calls": calls, "same": same or {}, "removed": list(removed), "missing": list(missing)}
    return find_kernels(SimpleNamespace(source_code=CODE, _workbench_kernels=kept), graph)


MM = ("extern_kernels.mm", "extern", ("mm",), ())
CPP = ("cpp_fused_0", "cpp", ("relu", "tanh"), ("mine",))
TRITON = ("triton_1", "triton", ("relu", "exp", "sum_1"), ())


def test_each_node_with_its_kernels_and_sources(graph):
    found = made(graph, MM, CPP, TRITON)
    assert [k.number for k in found.kernels if "relu" in k.nodes] == [1, 2]
    assert [k.source for k in found.kernels] == [
        "", "void kernel(const float* in, float* out) {}\n", "def triton_1(): pass\n"]
    assert found.fused == (4, 2) and found.launches == 3 and found.not_found == () and found.missing == ()
    assert found.kinds == {"triton": 1, "cpp": 1, "extern": 1}
    assert found.views == ("t",)
    assert repr(found) == ("Kernels(joint: 6 nodes, 3 calls (1 triton, 1 cpp, 1 extern); 4 nodes in 2 generated "
                           "kernels; 1 views in none; 0 taken out by Inductor's passes; not found: none)")
    assert repr(found.kernels[1]) == "Kernel(1 cpp_fused_0, cpp, nodes: relu, tanh, 1 of Inductor's own)"


ONLY_RELU = ("triton_1", "triton", ("relu",), ())
ONLY_SUM = ("triton_1", "triton", ("sum_1",), ())


def test_what_has_no_kernel_is_not_found_or_was_taken_out(graph):
    found = made(graph, MM, CPP, ONLY_RELU)
    assert found.not_found == ("sum_1", "exp") and "not found: sum_1, exp" in repr(found)
    found = made(graph, MM, CPP, ONLY_SUM, same={"exp": "relu"}, removed=["t"])
    assert found.same == {"exp": "relu"}
    assert found.views == () and found.not_found == () and "2 taken out" in repr(found)


def test_what_was_not_seen_is_missing(graph):
    found = made(graph, MM, CPP)
    assert found.missing == ("the calls of 1 kernels that the code defines: triton_1",)
    found = made(graph, missing=["this torch"])
    assert found.views == () and len(found.not_found) == 6 and found.missing[0] == "this torch"
    old = find_kernels(SimpleNamespace(source_code=CODE), graph)  # another version left it in the cache
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES" in old.missing[0] and old.kernels == () and old.code == CODE
    assert find_kernels(lambda args: args, graph) is None  # not Inductor's
