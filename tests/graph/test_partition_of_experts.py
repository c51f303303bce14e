"""A pair whose sizes only a step knows."""

import torch
from on_ranks import FSDP_TP, small

from workbench.authoring.author import author
from workbench.graph.capture import capture
from workbench.graph.partition import partition, saved_nodes
from workbench.torch_api.ops import is_symbolic


def test_a_pair_whose_sizes_a_step_decides_has_a_repr(fake4):
    model = {"model.family": "deepseek_v3", "model.n_layers": 2, "model.dispatch": "dropless", "mesh.ep": 2}
    pair = partition(capture(author(small(FSDP_TP).override(model), fake4)))
    saved = saved_nodes(*pair.graphs)
    assert any(is_symbolic(node.meta["val"]) and isinstance(node.meta["val"], torch.Tensor) for node in saved)
    assert repr(pair).startswith("ForwardBackward(small: forward ")
