"""What the verdicts showed of the passes of torchtitan 0.3.0's graph_trainer: a smallest graph of our own for each.

They are exhibits of the bug museum, and `benchmarks/graph_trainer_passes.py` runs them. The passes are experimental,
and train models in production; each of these concerns an option or a model that its default run does not have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from workbench import WorkbenchError, fake_world, judged
from workbench.checks.collectives import collectives_of
from workbench.checks.record import PassRecord

PACKAGE = "torchtitan.experiments.graph_trainer"
C10D = torch.ops._c10d_functional
WIDTH = 64


@dataclass(frozen=True)
class Exhibit:
    """bug: the fault in a sentence. seen: where. caught: what would have caught it. shown: runs it, and returns what is
    told of it.
    """

    name: str
    bug: str
    seen: str
    caught: str
    shown: Callable[[], str]


def traced(function: Callable[..., Any], inputs: list[torch.Tensor], backward: str,
           layers: dict[str, int]) -> GraphModule:
    """The graph of a function, with graph_trainer's metadata: from the node `backward` on it is the backward's, and
    each node is of the layer that the last node in `layers` before it has begun.
    """
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    late, layer = False, 0
    for node in gm.graph.nodes:
        late, layer = late or node.name == backward, layers.get(node.name, layer)
        if node.op == "call_function":
            node.meta["custom"] = {"module_fqn": f"layers.{layer}"}
            if late:
                node.meta["autograd_backward"] = True
    return gm


def three_layers(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """A product of layer 0 in two pieces, one of which layer 2 reads; at the end the backward reads the product."""
    product = x @ weight
    first, second = product.split_with_sizes([WIDTH // 2, WIDTH // 2], 1)
    one = first.relu() @ weight[:WIDTH // 2]  # layer 1
    two = one @ weight
    three = two + second.sum()  # layer 2
    gradient = torch.ones_like(three)
    return [three.sum(), gradient.t() @ product]


def offloaded(**options: int) -> tuple[GraphModule, list[Any]]:
    """graph_trainer's offloading of the product of `three_layers`; the graph, and the records."""
    inputs = [torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)]
    gm = traced(three_layers, inputs, "ones_like", {"mm": 0, "relu": 1, "sum_1": 2, "ones_like": 2})

    def tag(gm: GraphModule, example_inputs: Any) -> GraphModule:
        next(n for n in gm.graph.nodes if n.name == "mm").meta["recompute"] = CheckpointPolicy.MUST_CPU_OFFLOAD
        return gm

    offload = import_module(f"{PACKAGE}.cpu_offload").apply_cpu_offload_pass
    passes = [tag, functools.partial(offload, **options)]
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return judged(gm, fakes, passes, inputs)


def reader_of_freed_memory() -> str:
    return str(offloaded(defer_n_layers=1, prefetch_lookahead=0)[1][1].verdict("lint"))


def offload_at_once() -> str:
    try:
        offloaded(defer_n_layers=0, prefetch_lookahead=0)
    except WorkbenchError as error:
        return re.sub(r" \(.*", "", str(error))
    return "it runs"


def gradient(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """A weight's gradient, which FSDP scatters over all ranks: no tensor parallelism."""
    world = dist.group.WORLD
    assert world is not None
    whole = x.t() @ x.relu()
    return [C10D.wait_tensor(C10D.reduce_scatter_tensor(whole, "sum", world.size(), world.group_name))]


def fused(nccl: bool) -> PassRecord:
    """graph_trainer's async tensor parallelism on `gradient`, in torch's test mode, with NCCL in the build or not."""
    fuse = import_module(f"{PACKAGE}.passes").async_tensor_parallel_pass
    with fake_world(4):
        gm = traced(gradient, [torch.randn(16, WIDTH), torch.randn(32, WIDTH)], "relu", {})
        fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        with symmetric_memory._test_mode(), mock.patch.object(dist, "is_nccl_available", lambda: nccl):
            _, (record,) = judged(gm, fakes, [fuse])
        _ = record.verdicts  # the group's ranks are known here
        return record


def fused_gradients() -> str:
    record = fused(nccl=True)
    return f"{record.verdict('collectives')}: {', '.join(c.op for c in collectives_of(record.after))}"


def silent() -> str:
    return str(fused(nccl=False).verdict("effect"))


SEEN = "torchtitan 0.3.0, experiments/graph_trainer"
EXHIBITS = [
    Exhibit("reader_of_freed_memory",
            "Offloading frees a value whose pieces, by split_with_sizes, a later layer still reads: its list of views "
            "has split, and not split_with_sizes and unbind.",
            f"{SEEN}/cpu_offload.py, on a graph made by hand: in our three recipes no reader comes that late",
            "Owners of storage by the operators' schemas, and a lint rule for reads behind the wait that frees.",
            reader_of_freed_memory),
    Exhibit("offload_at_once",
            "With defer_n_layers=0 the wait stands behind the value that is offloaded, before the last reader that it "
            "names as its input.",
            f"{SEEN}/cpu_offload.py, option cpu_offload_defer_n_layers; its own graph.lint() stops it",
            "One run of each option's smallest value.",
            offload_at_once),
    Exhibit("fused_gradients",
            "Async tensor parallelism takes each product before a reduce-scatter, whatever its group: unless bucketing "
            "ran before, it fuses the scatter of FSDP's gradients as well.",
            f"{SEEN}/passes.py and torch 2.13's micro_pipeline_tp, in torch's test mode for CPUs",
            "A list of the fused launches by mesh axis. No verdict fails: the same bytes are sent.",
            fused_gradients),
    Exhibit("silent",
            "Where torch was built without NCCL, async tensor parallelism leaves each graph as it is, in silence.",
            f"{SEEN}/passes.py and torch 2.13's micro_pipeline_tp",
            "The verdict effect: NO_EFFECT.",
            silent),
]
