"""What the forward of a whole step saves keeps nothing else alive: without this, a norm's weight kept its bucket."""

from __future__ import annotations

import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.torch_api.inductor.kernels import seen
from workbench.torch_api.inductor.lowering import compile_inner


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
