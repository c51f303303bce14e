"""Which kernels Inductor is seen to make of a graph: complete, in calling order, and said where it is not."""

import re

import pytest
import torch
import torch._inductor.config
from graphs_by_hand import shards, two_layers
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import PassSpec, World, author_module, capture, fake_world, partition, run_joint, run_partitioned
from workbench.authoring.plans import ParallelPlan
from workbench.errors import WorkbenchError
from workbench.graph.callables import kernels_of
from workbench.graph.read.kernels import find_kernels
from workbench.pipeline.run_passes import capture_decompositions
from workbench.torch_api.inductor.kernels import _Watch, seen, sources
from workbench.torch_api.inductor.lowering import compile_inner

pytestmark = pytest.mark.integration

DECOMPOSE = [PassSpec(name="inductor_decomposition")]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x, y):
        return ((self.down(torch.relu(self.up(x))) - y) ** 2).mean()


def compile_gated(world=None):
    """The record of full_inductor_compilation on both graphs of a small model."""
    world = world or World("gloo", 1, 0, torch.device("cpu"))
    torch.manual_seed(0)
    batch = tuple(torch.randn(3, 6, device=world.device) for _ in range(2))
    authored = author_module(Gated(), world, None, ParallelPlan(), batch=lambda: batch)
    with capture(authored, decompositions=capture_decompositions(DECOMPOSE)) as joint:
        run_joint(joint, DECOMPOSE)
        pair = partition(joint)
    with torch._inductor.config.patch(fx_graph_cache=False):
        return run_partitioned(pair, ["full_inductor_compilation"])[0][0]


def kernels(record):
    return kernels_of(record.before, record.after)


@pytest.fixture(scope="module")
def record():
    return compile_gated()


def written_calls(code):
    """The calls that the wrapper makes, read from its text: a check of its own."""
    body = code[re.search(r"def call\(", code).start():code.index("def get_args") if "def get_args" in code else None]
    return re.findall(r"(?m)^ +(?:\w+ = )?(cpp_fused_\w+|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", body)


def test_every_call_in_order_and_every_node_accounted_for(record):
    for graph, compiled in zip(record.before, record.after, strict=True):
        found = seen(compiled)
        assert found.missing == () and [c.name for c in found.calls] == written_calls(found.code)
        made = find_kernels(compiled, graph)
        assert made.not_found == () and made.removed == ()
        calls = [n.name for n in graph.graph.nodes if n.op == "call_function"]
        assert made.nodes == tuple(calls)
        assert {*made.views, *made.same}.union(*(c.nodes for c in found.calls)) == set(calls)
        assert set(sources(found.code)) == {c.name for c in found.calls if c.kind == "cpp"}
    forward, backward = kernels(record)
    (relu,) = [k for k in forward.kernels if "relu" in k.nodes]
    assert relu.kind == "cpp" and "relu" in relu.name and "kernel(" in relu.source
    (matmul,) = [k for k in forward.kernels if "addmm" in k.nodes]
    assert (matmul.name, matmul.kind, matmul.source) == ("extern_kernels.addmm", "extern", "")
    # an alias of relu is taken out, and read as relu
    assert set(backward.same.values()) == {"relu"} and not record.before[0]._replace_hooks


def test_on_a_fake_world_kernels_are_written_and_not_built(record, monkeypatch):
    """Counted by the compiler's own calls; and what was written only does not serve a world whose kernels run."""
    import torch._inductor.codecache as codecache

    built = []
    load = codecache.CppPythonBindingsCodeCache.load_pybinding_async

    def loading(argtypes, source, *args, **kwargs):
        built.append(source.strip("\n") + "\n")
        return load(argtypes, source, *args, **kwargs)

    monkeypatch.setattr(codecache.CppPythonBindingsCodeCache, "load_pybinding_async", loading)
    codecache.PyCodeCache.cache_clear()  # the wrappers of other tests
    with fake_world(1) as world:
        written = compile_gated(world)
    assert built == []
    for fake, real in zip(kernels(written), kernels(record), strict=True):
        assert fake.missing == () and [(k.name, k.nodes, k.source) for k in fake.kernels] == [
            (k.name, k.nodes, k.source) for k in real.kernels]
    forward = written.after[0]
    with pytest.raises(WorkbenchError, match="written and not built, on a fake world"):
        forward([torch.ones(v.shape) if isinstance(v := n.meta["val"], torch.Tensor) else v
                 for n in written.before[0].graph.find_nodes(op="placeholder")])
    compile_gated()
    assert set(built) == {k.source for found in kernels(record) for k in found.kernels if k.source}


def test_an_error_while_watching_is_said_and_nothing_fails(monkeypatch):
    def broken(self, generated, made_of, name):
        raise AttributeError("no origins")

    monkeypatch.setattr(_Watch, "tell", broken)
    with fake_world(1) as world:
        found = seen(compile_gated(world).after[0])
    assert found.calls == () and "AttributeError: no origins" in found.missing[0]
    assert re.search(r"the calls of 2 kernels that the code defines: cpp_fused_\w+, cpp_fused_\w+", found.missing[-1])


def test_collectives_and_waits_are_calls_of_their_own():
    with fake_world(2):
        graph = make_fx(two_layers, tracing_mode="fake")(*shards(2))
        values = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
        names = [n.name for n in graph.graph.nodes if n.op == "call_function"]
        compiled, _ = compile_inner(graph, values, is_backward=False, static=[], visible=2,
                                    config={"fx_graph_cache": False})
    found = seen(compiled)
    kinds = [c.kind for c in found.calls]
    assert (kinds.count("collective"), kinds.count("wait"), kinds.count("extern")) == (2, 2, 2)
    assert {n for c in found.calls for n in c.nodes} | set(found.same) == set(names)
    for call in found.calls:
        if call.kind in ("collective", "wait"):
            (node,) = call.nodes
            assert node.startswith({"collective": "all_gather", "wait": "wait_tensor"}[call.kind])


@pytest.mark.gpu
def test_triton_kernels_on_a_gpu():
    record = compile_gated(World("nccl", 1, 0, torch.device("cuda", 0)))
    for found in kernels(record):
        assert found.not_found == () and found.missing == () and found.kinds["triton"]
        assert all("def triton_" in k.source for k in found.kernels if k.kind == "triton")
