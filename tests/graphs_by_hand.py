"""Small graphs for the tests of checks: one FSDP axis, functional collectives, no capture needed."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.graph.facts import GraphFacts, Part, set_facts

C10D = torch.ops._c10d_functional
OFFLOADS = pytest.mark.skipif(find_spec("torch._functorch._activation_offloading.offload_ops") is None,
                              reason="torch's operators of offloading came with 2.13")
DIM = 8


def group_name() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def trace(function: Callable[..., Any], *args: torch.Tensor, graph: Part = "forward") -> torch.fx.GraphModule:
    """The graph of `function` with fake values in its metadata and a captured graph's facts."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    name, size = group_name(), dist.get_world_size()
    set_facts(gm, GraphFacts(graph, {"dp_shard": name}, {name: size}))
    return gm


def gather(shard: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, dist.get_world_size(), group_name()))


def scatter(whole: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(whole, "sum", dist.get_world_size(), group_name()))


def two_layers(shard_a: torch.Tensor, shard_b: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """Two gathered weights, each used once; the second one's gather starts before the first matmul."""
    a, b = gather(shard_a), gather(shard_b)
    hidden = torch.relu(x @ a)
    return [hidden @ b, hidden]


def shards(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = DIM // size
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(n, DIM, generator=generator) for n in (rows, rows, 3))  # type: ignore[return-value]


def two_layer_graph() -> torch.fx.GraphModule:
    return trace(two_layers, *shards(dist.get_world_size()))


def named(gm: torch.fx.GraphModule, part: str) -> list[torch.fx.Node]:
    """Operator nodes whose target's name contains `part`."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and part in str(n.target)]


def backward_of(forward: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that takes all that `forward` returns but its first output, the result."""
    graph = torch.fx.Graph()
    graph.output([graph.placeholder(f"saved_{i}") for i in range(len(forward.graph.output_node().args[0]) - 1)])
    return torch.fx.GraphModule({}, graph)
