"""Traffic and estimated time of kernels, where a compiler fuses chains of pointwise operators and reductions.

A kernel that only moves bytes costs what it reads from other kernels and writes for them, at full memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import networkx as nx
from torch.fx import GraphModule, Node

from workbench.graph.read.composites import ATTENTION, Composite, attention_ms, composites
from workbench.graph.read.cost import DeviceSpec, device_spec, node_ms
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.graph.read.nodes import is_compute, kind_of, reachable
from workbench.torch_api.ops import COMPILED_REGION, tensor_bytes

_FUSES = frozenset({"pointwise", "reduction", "copy", "create", "index", "random"})
_THROUGH = frozenset({"view", "bookkeeping"})


def fusion_groups(gm: GraphModule) -> list[list[Node]]:
    """The nodes that a compiler would compute in one kernel, estimated; groups in the order of their last nodes.

    Nodes join the kernels of their inputs, but not across a matmul, an attention, a collective or a wait.
    """
    fuses = {n for n in gm.graph.nodes if kind_of(n) in _FUSES and COMPILED_REGION not in n.meta}
    level = _levels(gm, fuses)
    joined = nx.Graph()
    for node in gm.graph.nodes:
        if node in fuses:
            joined.add_node(node)
            joined.add_edges_from((node, n) for n in map(_source, node.all_input_nodes)
                                  if n in fuses and level[n] == level[node])
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    groups = [sorted(group, key=place.__getitem__) for group in nx.connected_components(joined)]
    return sorted(groups, key=lambda group: place[group[-1]])


def _levels(gm: GraphModule, fuses: Collection[Node]) -> dict[Node, int]:
    """How many matmuls, attentions, collectives and waits lie before each node, at most.

    One kernel has one level, so kernels form no circle. A node whose users have a higher level takes theirs: a compiler
    computes it where it is used.
    """
    apart = {
        n: n.op == "call_function" and n not in fuses and kind_of(n) not in _THROUGH
        for n in gm.graph.nodes
    }
    level: dict[Node, int] = {}
    for node in gm.graph.nodes:
        level[node] = max((level[n] + apart[n] for n in node.all_input_nodes), default=0)
    for node in reversed(gm.graph.nodes):
        if kind_of(node) == "reduction":
            continue  # computed with its inputs, which are larger
        level[node] = min((level[user] - apart[node] for user in node.users if user.op != "output"),
                          default=level[node])
    return level


def with_views(group: Iterable[Node]) -> set[Node]:
    """The nodes of a kernel and the views of its results."""
    return reachable(group, lambda node: (user for user in node.users if _is_view(user)))


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and kind_of(node) in _THROUGH


def _views(node: Node) -> list[Node]:
    """A view, what it is a view of, and so on to the node that owns the memory; a node that is no view alone."""
    chain = [node]
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
        chain.append(node)
    return chain


def _source(node: Node) -> Node:
    """The node whose memory a view shows; a node that is no view itself."""
    return _views(node)[-1]


@dataclass(frozen=True)
class KernelTraffic:
    """The nodes that one kernel computes, and the bytes of each tensor that it reads and writes.

    readers: of each tensor that is read, the first node of the kernel that reads it.
    """

    nodes: tuple[Node, ...]
    reads: dict[str, int]
    writes: dict[str, int]
    readers: dict[str, Node] = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def traffic_of(nodes: Collection[Node]) -> KernelTraffic:
    """What one kernel reads from outside, each tensor once, and writes for others.

    Views cost nothing: their readers read the tensor that owns the memory, and no more of it than each view shows.
    """
    inside = set(nodes)
    reads, writes, readers = dict[str, int](), dict[str, int](), dict[str, Node]()
    for node in nodes:
        out = tensor_bytes(node.meta.get("val"))
        for operand in node.all_input_nodes:
            source = _source(operand)
            if source in inside or operand in inside:
                continue
            size = min(
                filter(None, (tensor_bytes(n.meta.get("val")) for n in _views(operand))), default=0
            )
            # reads some rows of a table
            size = min(size, out) if kind_of(node) == "index" else size
            reads[source.name] = max(reads.get(source.name, 0), size)
            readers.setdefault(source.name, node)
        if any(user not in inside for user in _readers(node)):
            writes[node.name] = out
    return KernelTraffic(tuple(nodes), reads, writes, readers)


def _readers(node: Node) -> Iterable[Node]:
    """The nodes that read a node's memory, itself or through views."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _moving_ms(nodes: Collection[Node], spec: DeviceSpec) -> float:
    return spec.moving_ms(traffic_of(nodes).bytes) if nodes else 0.0


def separate_ms(gm: GraphModule, device: str | DeviceSpec) -> dict[Node, float]:
    """Milliseconds of each node where each operator is a kernel; one that is captured in parts is one on a GPU."""
    spec = device_spec(device)
    costs = {node: node_ms(node, spec) for node in gm.graph.nodes}
    for call in composites(gm, spec):
        if call.operator == ATTENTION:
            costs |= attention_ms(call, spec)
        else:
            costs |= dict.fromkeys(call.nodes, 0.0) | {call.nodes[-1]: _norm_ms(call, spec)}
    return costs


def _norm_ms(call: Composite, spec: DeviceSpec) -> float:
    """One kernel forward; in the backward, which reads all twice, one for each gradient.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    traffic = traffic_of(call.nodes)
    again = spec.moving_ms(sum(traffic.reads.values())) if call.backward else 0.0
    return spec.moving_ms(traffic.bytes) + again


def fused_ms(gm: GraphModule, device: str | DeviceSpec) -> dict[Node, float]:
    """Milliseconds of each node; that of a fused kernel counts at its last node, and its other nodes cost nothing."""
    spec = device_spec(device)
    attentions = _attentions(gm, spec)
    costs = {node: node_ms(node, spec) for node in gm.graph.nodes}
    for group in fusion_groups(gm):
        moving = _moving_ms([n for n in group if n not in attentions], spec)
        costs |= dict.fromkeys(group, 0.0) | {group[-1]: moving}
    return costs | attentions


def _attentions(gm: GraphModule, spec: DeviceSpec) -> dict[Node, float]:
    """The nodes of attentions in parts, with their share of the time of the one kernel."""
    times: dict[Node, float] = {}
    for call in composites(gm, spec):
        if call.operator == ATTENTION:
            times |= attention_ms(call, spec)
    return times


def kernels_ms(kernels: Kernels, gm: GraphModule, device: str | DeviceSpec) -> list[float]:
    """Milliseconds of each call in `kernels`, which Inductor made of `gm`; 0 for collectives and waits.

    A node that several calls compute counts in the first.
    """
    spec = device_spec(device)
    named = {node.name: node for node in gm.graph.nodes}
    attentions = _attentions(gm, spec)
    counted: set[str] = set()

    def ms(kernel: Kernel) -> float:
        nodes = [named[n] for n in kernel.nodes if n not in counted]
        counted.update(kernel.nodes)
        products = [n for n in nodes if is_compute(n)]
        if not kernel.launches or (kernel.kind == "collective" and not products):
            return 0.0
        if products or kernel.kind == "extern":
            return sum(attentions.get(n, node_ms(n, spec)) for n in products or nodes)
        return _moving_ms(
            [n for n in nodes if kind_of(n) not in _THROUGH and n not in attentions], spec
        )

    return [ms(kernel) for kernel in kernels.kernels]
