"""How long a node would take on a device, and how many FLOP a graph does: estimates, from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import flop_registry

from workbench.graph.read.collectives import Collective, list_collectives
from workbench.graph.read.nodes import kind_of, module_path
from workbench.torch_api.device_specs import DEVICES, DeviceSpec, Known, device_spec, device_specs
from workbench.torch_api.ops import hint, op_name, tensor_bytes

__all__ = ["DEVICES", "DeviceSpec", "GraphCost", "Known", "collective_ms", "device_spec", "device_specs", "flops",
           "flops_per_token", "graph_cost", "node_flops", "node_ms"]

_FREE = ("view", "bookkeeping", "wait", "collective")


def _attention_flops(node: torch.fx.Node, backward: bool) -> int:
    """Matmuls of attention, unmasked: 2 forward, 5 backward (one repeats the scores). Fewer key heads are repeated."""
    given = (a.meta.get("val") for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.fx.Node))
    tensors = [t for t in given if isinstance(t, torch.Tensor)]  # one tensor may be query, key and value
    tensors = [t for t in tensors if t.dim() == 4]
    query, key, value = tensors[1:4] if backward else tensors[:3]
    batch, heads, queries, depth = map(hint, query.shape)
    keys, value_depth = hint(key.shape[2]), hint(value.shape[3])
    scores, mix = 2 * batch * heads * queries * keys * depth, 2 * batch * heads * queries * keys * value_depth
    return 3 * scores + 2 * mix if backward else scores + mix


def _grouped_flops(node: torch.fx.Node) -> int:
    """Every row of a grouped product meets one group's matrix; where both are 2-D, the groups cut the summed dim."""
    left, right = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    groups = left.shape[0] if (left.dim(), right.dim()) == (3, 2) else 1
    return 2 * hint(left.numel()) * hint(right.shape[-1]) // groups


def node_flops(node: torch.fx.Node) -> int:
    """FLOP of a matmul, a convolution or attention; 0 for anything else. Source: torch.utils.flop_counter."""
    if node.op != "call_function":
        return 0
    name = op_name(node.target)
    if "scaled_dot_product" in name:
        return _attention_flops(node, "backward" in name)
    if name.endswith("_grouped_mm"):
        return _grouped_flops(node)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return hint(formula(*args, **kwargs, out_val=node.meta.get("val")))


def flops(gm: torch.fx.GraphModule) -> dict[str, int]:
    """FLOP by operator, largest first."""
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if count := node_flops(node):
            found[op_name(node.target)] += count
    return dict(found.most_common())


def flops_per_token(gm: torch.fx.GraphModule | Sequence[torch.fx.GraphModule], tokens: int) -> float:
    """FLOP of this rank's graph, or graphs, for each token of its batch; recomputation counts."""
    graphs = [gm] if isinstance(gm, torch.fx.GraphModule) else gm
    return sum(sum(flops(g).values()) for g in graphs) / tokens


def collective_ms(c: Collective, device: str | DeviceSpec) -> float:
    """Ring model: a start, and the bytes that each rank sends over its slowest link. Groups of one are free."""
    spec = device_spec(device)
    if c.group_size <= 1:
        return 0.0
    rate = spec.link_gbps if c.group_size <= spec.ranks_per_host else spec.net_gbps
    trips = 2.0 if c.kind == "all_reduce" else 1.0
    sent = trips * c.payload * (c.group_size - 1) / c.group_size
    return spec.latency_us / 1e3 + sent / (rate * 1e9) * 1e3


def node_ms(node: torch.fx.Node, device: str | DeviceSpec, efficiency: float = 0.75) -> float:
    """Roofline of one node: the longer of its FLOP at `efficiency` of the peak and its bytes read and written.

    0 for views, waits and collectives (see `collective_ms`). Every operator counts as a kernel of its own.
    """
    if node.op != "call_function" or kind_of(node) in _FREE:
        return 0.0
    spec = device_spec(device)
    value = node.meta.get("val")
    tensors = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    moved = tensor_bytes(tensors) + sum(tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes)
    dtype = tensors[0].dtype if tensors else torch.float32
    compute = node_flops(node) / (efficiency * spec.peak(dtype))
    return 1e3 * max(compute, moved / (spec.dram_gbps * 1e9))


@dataclass(frozen=True)
class GraphCost:
    """Estimated milliseconds of one graph, nothing overlapped; `by_module` for compute alone."""

    device: str
    compute_ms: float
    collective_ms: float
    flops: int
    by_kind: dict[str, float]
    by_module: dict[str, float] = field(repr=False)


def _largest(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def graph_cost(gm: torch.fx.GraphModule, device: str | DeviceSpec) -> GraphCost:
    """Add up the nodes and the collectives of a graph on a device."""
    spec = device_spec(device)
    kinds: dict[str, float] = {}
    modules: dict[str, float] = {}
    for node in gm.graph.nodes:
        if ms := node_ms(node, spec):
            kind, module = kind_of(node), module_path(node)
            kinds[kind] = kinds.get(kind, 0.0) + ms
            modules[module] = modules.get(module, 0.0) + ms
    talk = sum(collective_ms(c, spec) for c in list_collectives(gm))
    return GraphCost(spec.name, sum(kinds.values()), talk, sum(flops(gm).values()), _largest(kinds), _largest(modules))
