import gc
import weakref

import torch
from graphs_by_hand import named, two_layer_graph

from workbench.graph.read.nodes import block_of, kind_of, module_path, nodes_from_line, provenance
from workbench.torch_api.module_paths import clean_path


def test_views_and_pointwise_are_told_from_copies(fake4):
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x.t().view(-1).clone().exp().sum())(torch.ones(1, 4))
    assert [kind_of(n) for n in gm.graph.nodes if n.op == "call_function"] == ["view", "view", "copy", "pointwise",
                                                                              "reduction"]


def test_module_paths_do_not_depend_on_the_name_of_self(fake4):
    for raw in ("L['self'].layers.0.attention", "L['model'].layers['0'].attention",
                "L['self']._modules['layers']._modules['0'].attention", "layers.0.attention"):
        assert clean_path(raw) == "layers.0.attention"


def test_backward_nodes_have_their_forward_module_and_line(fake4):
    gm = two_layer_graph()
    node = named(gm, "aten.mm")[0]
    node.meta.pop("nn_module_stack", None)
    node.meta["fwd_nn_module_stack"] = {"k": ("L['self'].layers.1.feed_forward", torch.nn.Linear)}
    node.meta["stack_trace"] = '  File "/x/model.py", line 12, in forward\n    return self.w1(x)\n'
    found = provenance(node)
    assert module_path(node) == found.module == "layers.1.feed_forward"
    assert (found.file, found.line, found.text, found.backward) == ("/x/model.py", 12, "return self.w1(x)", True)
    assert nodes_from_line(gm, "model.py", 12) == [node]
    assert nodes_from_line(gm, "model.py", 13) == []


def test_reading_a_nodes_block_does_not_keep_its_graph(fake4):
    gm = two_layer_graph()
    node = named(gm, "aten.mm")[0]
    node.meta["nn_module_stack"] = {"k": ("L['self'].layers.1.feed_forward", torch.nn.Linear)}
    assert block_of(node) == "layers.1"
    for path, block in [("model.h.12.mlp.0", "model.h.12"), ("0", "0"), ("conv2d.w1", "")]:
        node.meta["nn_module_stack"] = {"k": (f"L['self'].{path}", torch.nn.Linear)}
        assert block_of(node) == block
    graph = weakref.ref(gm.graph)
    del gm, node
    gc.collect()
    assert graph() is None
