"""Which node owns each value's memory, what is saved between forward and backward, and the peak in node order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from workbench.graph.facts import facts_of
from workbench.graph.read.nodes import kind_of, module_path, provenance
from workbench.torch_api.aot import is_parameter, parameter_of
from workbench.torch_api.ops import (
    aliased_inputs,
    calls_of,
    collective_kind,
    op_name,
    own_bytes,
    storage_key,
    tensor_bytes,
    writes,
    written_inputs,
)

Graph = torch.fx.GraphModule


def roots(gm: Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Each node's storage owner: views, in-place results and waits are followed through any chain to it.

    A wait shares its collective's storage; an `_out` collective shares its `out` buffer's.
    """
    owner: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        aliased = aliased_inputs(node)
        owner[node] = owner[aliased[0]] if aliased else node
    return owner


def item_roots(gm: Graph, owner: dict[torch.fx.Node, torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    """The same, where an item of a tuple that an operator has made is the owner of its own memory."""
    items: dict[tuple[torch.fx.Node, object], torch.fx.Node] = {}
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        root = owner[node]
        if root is node or not isinstance(root.meta.get("val"), list | tuple):
            found[node] = root
        elif (aliased := aliased_inputs(node)[0]) is root and op_name(node.target) == "operator.getitem":
            found[node] = items.setdefault((root, node.args[1]), node)
        else:
            found[node] = found[aliased]
    return found


def inputs_written(gm: Graph) -> list[torch.fx.Node]:
    """The graph's inputs whose memory a node writes into."""
    owner = roots(gm)
    found = [owner[n] for node in calls_of(gm.graph, writes) for n in written_inputs(node)]
    return [node for node in dict.fromkeys(found) if node.op == "placeholder"]


def alias_chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node and what it aliases, step by step to the storage's owner: `t, t, view, view, wait, all-gather`."""
    chain = [node]
    while aliased := aliased_inputs(chain[-1]):
        chain.append(aliased[0])
    return chain


def storage_roots(gm: Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """The same by the fake tensors' storages, for a cross-check: the first node that has each storage.

    Valid as long as no pass has replaced nodes without keeping their values' storages.
    """
    first: dict[int, torch.fx.Node] = {}
    owner: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        key = storage_key(node.meta.get("val"))
        owner[node] = node if key is None else first.setdefault(key, node)
    return owner


_CARRIES = ("view", "copy", "create", "wait", "collective")


class Flow:
    """Where values come from, including buffers that are filled after they are created, as buckets are.

    saved: a backward's saved tensors count as parameters too, since one may be a gathered parameter.
    """

    def __init__(self, gm: Graph, *, saved: bool = False):
        self.owner = roots(gm)
        self.writers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in calls_of(gm.graph, lambda target: writes(target) and collective_kind(target) is None):
            for buffer in written_inputs(node):
                self.writers.setdefault(self.owner[buffer], []).append(node)
        inputs = gm.graph.find_nodes(op="placeholder")
        if not saved and any("desc" in n.meta for n in inputs):
            found = set(filter(is_parameter, inputs))
        else:  # a graph without descriptors: only the names of tangents tell them apart
            found = {n for n in inputs if (is_parameter(n) if "desc" in n.meta else not n.name.startswith("tangents"))}
        self._parameters: dict[torch.fx.Node, frozenset[torch.fx.Node] | None] = {
            n: frozenset([n]) if n in found else None for n in inputs}

    def sources(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes whose values `node` holds: its inputs, and for a buffer what is written into it."""
        found = list(node.all_input_nodes)
        for writer in self.writers.get(node, ()):
            filled = {self.owner[n] for n in written_inputs(writer)}
            found += [n for n in writer.all_input_nodes if self.owner[n] not in filled]
        return [n for n in found if isinstance(n.meta.get("val"), torch.Tensor | list | tuple)]

    def parameters(self, node: torch.fx.Node) -> frozenset[torch.fx.Node] | None:
        """The parameters whose values `node` holds, through views, casts, pads, collectives and bucketing alone.

        None for a node that holds anything else.
        """
        if node not in self._parameters:
            self._parameters[node] = frozenset()  # a buffer may be reached again through its own writers
            held: list[frozenset[torch.fx.Node] | None] = [None]
            if node.op == "call_function" and (kind_of(node) in _CARRIES or aliased_inputs(node)):
                held = [self.parameters(source) for source in self.sources(node)]
            self._parameters[node] = None if None in held else frozenset().union(*held)  # type: ignore[arg-type]
        return self._parameters[node]


def parameter_moves(gm: Graph) -> set[torch.fx.Node]:
    """The nodes that hold parameters and nothing else: gathers, casts, buckets and views, also of saved tensors."""
    flow = Flow(gm, saved=True)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return {n for n in calls if flow.sources(n) and flow.parameters(n) is not None}


def parameter_gathers(gm: Graph, flow: Flow | None = None) -> list[torch.fx.Node]:
    """The all-gathers that move parameters only (FSDP's), bucketed ones included, and not activations (TP's)."""
    flow = flow or Flow(gm)
    gathers = calls_of(gm.graph, lambda target: collective_kind(target) == "all_gather")
    return [n for n in gathers if flow.parameters(n)]


@dataclass(frozen=True)
class SavedTensor:
    """One forward output that the backward reads.

    `held_bytes`: what keeping it adds: its whole storage, once for each storage, 0 for the graph's inputs.
    `source`: file and line of the model's code. `policy`: its tag, by the name in
    torch.utils.checkpoint.CheckpointPolicy, from a checkpointing pass or, for a collective's result, from the
    partitioner; "none" without one.
    `alias`: the chain from the node to its storage's owner. `gathered`: the all-gather of a parameter whose memory
    (`copied` False) or a plain copy of it (`copied` True) this keeps alive.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    held_bytes: int
    module: str
    source: str
    policy: str
    root: str
    alias: tuple[str, ...]
    gathered: str | None = None
    copied: bool = False


def _gather_behind(
    node: torch.fx.Node, gathers: Collection[torch.fx.Node], flow: Flow
) -> tuple[torch.fx.Node | None, bool]:
    """(the parameter gather whose value `node` is, whether copies stand between)."""
    copied, todo, seen = False, [node], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in gathers:
            return current, copied
        aliased = aliased_inputs(current)
        if aliased:
            todo += aliased
        elif current.op == "call_function" and kind_of(current) in ("copy", "view", "create"):
            copied = True
            todo += flow.sources(current)
    return None, False


Saved = int | Collection[str] | Graph


def _saved_nodes(forward: Graph, saved: Saved) -> list[torch.fx.Node]:
    outputs = next(iter(reversed(forward.graph.nodes))).args[0]
    if isinstance(saved, Graph):  # by place: a pass may give a saved value another name
        taken = [n for n in saved.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
        saved = len(outputs) - len(taken)  # type: ignore[arg-type]
    nodes = [n for n in outputs if isinstance(n, torch.fx.Node)] if isinstance(outputs, list | tuple) else []
    if isinstance(saved, int):
        nodes = [n for n in list(outputs)[saved:] if isinstance(n, torch.fx.Node)]  # type: ignore[arg-type]
    else:
        nodes = [n for n in nodes if n.name in saved]
    return list(dict.fromkeys(nodes))


def saved_tensors(forward: Graph, saved: Saved) -> list[SavedTensor]:
    """What the forward graph keeps for the backward; values that are not tensors are left out.

    `saved`: the number of forward outputs that are results (what follows is saved), the saved nodes' names, or the
    backward graph, whose placeholders before the tangents they are.
    """
    flow = Flow(forward)
    gathers = set(parameter_gathers(forward, flow))
    owner, counted, rows = flow.owner, set(), []
    holder = item_roots(forward, owner)
    for node in _saved_nodes(forward, saved):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        root = owner[node]
        held = 0 if holder[node] in counted or root.op == "placeholder" else own_bytes(holder[node])
        counted.add(holder[node])
        gather, copied = _gather_behind(node, gathers, flow)
        rows.append(SavedTensor(
            node.name, tuple(int(s) if isinstance(s, int) else -1 for s in value.shape),
            str(value.dtype).removeprefix("torch."), tensor_bytes(value), held, module_path(node),
            provenance(node).place, getattr(node.meta.get("recompute"), "name", "none"), root.name,
            tuple(n.name for n in alias_chain(node)),
            gather.name if gather is not None else None, copied,
        ))
    return rows


def gathered_parameters_kept(forward: Graph, saved: Saved, copies: bool = False) -> list[SavedTensor]:
    """Saved tensors that keep a gathered parameter's memory alive; with `copies`, plain copies of it too."""
    return [row for row in saved_tensors(forward, saved) if row.gathered and (copies or not row.copied)]


@dataclass(frozen=True)
class MemoryProfile:
    """Estimated bytes alive while each node runs, in node order. Workspaces and fragmentation are not in it."""

    peak_bytes: int
    peak_node: str
    input_bytes: int
    holders: tuple[tuple[str, int, str], ...]
    curve: tuple[int, ...] = field(repr=False)
    nodes: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"peak {self.peak_bytes:,} B at {self.peak_node}, {self.input_bytes:,} B of it inputs"]
        return "\n".join(lines + [f"  {size:>14,} B  {name}  {module}" for name, size, module in self.holders])


def _freed_by_graph(node: torch.fx.Node, backward: bool) -> bool:
    return backward and not node.name.startswith("primals") and parameter_of(node) is None


def live_bytes(gm: Graph, holders: int = 8) -> MemoryProfile:
    """Peak of the memory that the graph's values need when each is freed after its last use.

    Inputs stay until the end, but for a backward graph's saved tensors and tangents, which it frees.
    """
    nodes: Sequence[torch.fx.Node] = list(gm.graph.nodes)
    tensor = roots(gm)
    owner = item_roots(gm, tensor)
    backward = facts_of(gm).part == "backward"
    last: dict[torch.fx.Node, int] = {}
    for i, node in enumerate(nodes):
        last[owner[node]] = i
        for used in node.all_input_nodes:
            last[owner[used]] = i
    size = {n: own_bytes(n) for n in last}
    position = {n: i for i, n in enumerate(nodes)}
    made = [0] * len(nodes)
    for node in last:
        if tensor[node] is not node:  # an item, there as soon as its tuple is, which keeps the rest
            size[tensor[node]] -= size[node]
    inputs = {n for n in last if n.op in ("placeholder", "get_attr")}
    freed = [0] * len(nodes)
    for node, i in last.items():
        if node not in inputs:
            made[position[tensor[node]]] += size[node]
        if node not in inputs or _freed_by_graph(node, backward):
            freed[i] += size[node]
    now = peak = start = sum(size[n] for n in inputs)
    at, curve = 0, []
    for i in range(len(nodes)):
        now += made[i]
        curve.append(now)
        if now > peak:
            peak, at = now, i
        now -= freed[i]
    alive = [n for n in last if (n in inputs or position[tensor[n]] <= at)
             and (last[n] >= at or (n in inputs and not _freed_by_graph(n, backward)))]
    alive.sort(key=lambda n: -size[n])
    named = tuple((n.name, size[n], parameter_of(n) or module_path(n)) for n in alive[:holders])
    return MemoryProfile(peak, nodes[at].name if nodes else "", start, named, tuple(curve),
                         tuple(n.name for n in nodes))


