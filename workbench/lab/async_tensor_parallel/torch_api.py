"""torch's pass that puts a tensor-parallel collective and its products into one operator.

Source: torch/_inductor/fx_passes/micro_pipeline_tp.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor.fx_passes import micro_pipeline_tp
from torch.distributed import _symmetric_memory as symm_mem
from torch.fx import GraphModule, Node

from workbench.torch_api.distributed import symmetric_memory

_HALVES: dict[str, tuple[Any, Any]] = {
    "reduce_scatter": (micro_pipeline_tp.find_reduce_scatter_patterns, micro_pipeline_tp.fuse_matmul_reduce_scatter),
    "all_gather": (micro_pipeline_tp.find_all_gather_patterns, micro_pipeline_tp.fuse_all_gather_matmul),
}
KINDS = tuple(_HALVES)


def fuse_with_products(gm: GraphModule, group: str, kind: str, on_gpus: bool) -> dict[str, Node]:
    """Half of torch's pass, on the collectives of one group and kind; the replaced nodes, by the name of the new one.

    The halves run one by one: as one, they fail on a product that reads a gather and is scattered.

    It knows no other view than `aten.reshape`, and takes one before a product for a view that keeps the columns: so
    only those become `aten.reshape`, as Inductor makes of all views. New nodes have no metadata.
    on_gpus: false for a graph whose ranks have no symmetric memory, and then nothing may run it.
    """
    for view in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        for node in gm.graph.find_nodes(op="call_function", target=view):
            if node.meta["val"].shape[-1:] == node.all_input_nodes[0].meta["val"].shape[-1:]:
                node.target = torch.ops.aten.reshape.default
    replaced = dict[str, Node]()
    with ExitStack() as stack:
        if on_gpus:
            symmetric_memory.enable(group)
        else:  # torch 2.11 to 2.13 leave every graph as it is where torch was built without NCCL
            stack.enter_context(symm_mem._test_mode({group}))
            stack.enter_context(mock.patch.object(dist, "is_nccl_available", lambda: True))
        stack.enter_context(
            gm._set_replace_hook(lambda old, new, user: replaced.setdefault(new, old))
        )
        find, fuse = _HALVES[kind]
        for match in find(gm.graph):
            fuse(match)
    return replaced
