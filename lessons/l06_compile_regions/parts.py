"""Small functions with regions, and the parts in which Inductor gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.fx import GraphModule, Node

from workbench import World, author_module, capture
from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward, partition
from workbench.graph.read.kernels import region_kernels
from workbench.graph.read.nodes import kind_of, module_path
from workbench.notebook.draw.picture import Table, table
from workbench.passes.regional_inductor import parts_to_compile
from workbench.pipeline.run_passes import PassRecord
from workbench.torch_api.ops import short_name

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
X = torch.linspace(-1, 3, 32 * 64).view(32, 64)
IN_THE_BACKWARD = ("The five with the name in the lower row (Inductor's `cos` is the picture's `cos_1`),\n"
                   "and sin once more: it is no input, so the backward recomputes it.")


class Small(nn.Module):
    """A function of x [32, 64] and a weight [64, 64]; the loss is the sum."""

    def __init__(self, body: Body):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.w = body, nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x, self.w).sum()


def joint_of(body: Body, model: Callable[[Body], nn.Module] = Small) -> JointGraph:
    """The joint graph of a function, with values, on one rank."""
    alone = World("gloo", 1, 0, torch.device("cpu"))
    return capture(author_module(model(body), alone, None, batch=lambda: (X,)))


def name_of(node: Node) -> str:
    """The name of the node's region, or ""."""
    return str((node.meta.get("custom") or {}).get("region", ""))


def part_of(graph: GraphModule) -> Callable[[Node], str]:
    """What colours a node by its part."""
    parts = enumerate(parts_to_compile(graph), 1)
    numbers = {node: f"part {number}" for number, (_, nodes) in parts for node in nodes}
    return lambda node: numbers.get(node, "")


def listed(nodes: Iterable[Node]) -> str:
    """The names of the nodes without views and copies."""
    return " ".join(n.name for n in nodes if kind_of(n) not in ("view", "copy"))


def operators(graph: GraphModule) -> str:
    """The operators of a graph that are in a region, as the option `fallback` names them; without views and copies."""
    calls = (n for n in graph.graph.nodes if n.op == "call_function" and name_of(n))
    return " ".join(short_name(n) for n in calls if kind_of(n) not in ("view", "copy"))


def parts_table(pairs: Mapping[str, ForwardBackward]) -> Table:
    """The parts of each function's forward, with a bar between two parts."""
    rows = [(name, " | ".join(listed(nodes) for _, nodes in parts_to_compile(pair.forward)))
            for name, pair in pairs.items()]
    return table("parts of region a, with a bar between them", ("function", "forward"), rows)


def one_part_figures(body: Body) -> dict[str, int]:
    """Of the checkpoint's function: parts in the forward, what has no name, and whether the values changed."""
    forward, w = partition(joint_of(body)).forward, Small(body).w
    outside = Counter(kind_of(n) for n in forward.graph.nodes if not name_of(n))
    wanted = ((X @ w).sin() * X.mean()).cos()
    return {"parts": len(parts_to_compile(forward)),
            "other operators outside": outside["pointwise"] + outside["matmul"],
            "means inside": 2 - outside["reduction"],  # the other one outside is the final sum
            "other values": int(not torch.equal(body(X, w), wanted))}


def kinds_table(graph: GraphModule, region: str, block: str) -> Table:
    """The operators of a region in one block: how many Inductor gets, and how many stay outside."""
    parts = parts_to_compile(graph, [region])
    inside = {node for name, nodes in parts if name.endswith(block) for node in nodes}
    named = [n for n in graph.graph.nodes if name_of(n) == region and block in module_path(n)]
    counts: Counter[tuple[str, bool]] = Counter()
    for node in named:
        is_view = kind_of(node) == "view" and "split" not in node.name
        kind = "views" if is_view else node.name.rstrip("_0123456789")
        counts[kind, node in inside] += 1
    kinds = dict.fromkeys(kind for kind, _ in counts)
    rows = [(kind, counts[kind, True], counts[kind, False]) for kind in kinds]
    return table(f"region {region} in the forward of {block}", ("operators", "go in", "stay out"), rows)


def kernel_table(record: PassRecord, within: str = "", *, only: str = "") -> Table:
    """The calls of each compiled part: kernels that Inductor wrote, and library calls. only: forward or backward."""
    rows = []
    for part, graph in zip(record.parts, record.after, strict=True):
        for compiled in region_kernels(graph):
            if within in compiled.graph and only in part:
                rows += [(part, call.name, call.kind, " ".join(call.nodes)) for call in compiled.kernels]
    return table("what the compiled parts call", ("graph", "kernel", "kind", "operators in it"), rows)


def matmuls(graph: GraphModule) -> str:
    """The matmuls of a graph, each with its region."""
    nodes = [n for n in graph.graph.nodes if kind_of(n) == "matmul"]
    return ", ".join(f"{n.name} ({name_of(n) or 'no name'})" for n in nodes)
