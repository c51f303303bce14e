"""The node that owns each value's memory, and the tensors saved for the backward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from workbench.graph.read.nodes import kind_of, module_path, output_values, provenance
from workbench.torch_api.aot import is_parameter, is_tangent
from workbench.torch_api.ops import (
    aliased_inputs,
    calls_of,
    collective_kind,
    op_name,
    own_bytes,
    tensor_bytes,
    writes,
    written_inputs,
)

Graph = torch.fx.GraphModule


def roots(gm: Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """The node that owns each node's storage, through any chain of views, in-place results and waits.

    A wait shares the storage of its collective, and an `_out` collective that of its `out` buffer.
    """
    owner: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        aliased = aliased_inputs(node)
        owner[node] = owner[aliased[0]] if aliased else node
    return owner


def item_roots(
    gm: Graph, owner: dict[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Like `roots`, but each item of an operator's tuple owns its own memory."""
    items: dict[tuple[torch.fx.Node, object], torch.fx.Node] = {}
    item_of: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        root = owner[node]
        if root is node or not isinstance(root.meta.get("val"), list | tuple):
            item_of[node] = root
        elif (aliased := aliased_inputs(node)[0]) is root and op_name(
            node.target
        ) == "operator.getitem":
            item_of[node] = items.setdefault((root, node.args[1]), node)
        else:
            item_of[node] = item_of[aliased]
    return item_of


def inputs_written(gm: Graph) -> list[torch.fx.Node]:
    """The graph's inputs that some node writes to."""
    owner = roots(gm)
    written = [owner[n] for node in calls_of(gm.graph, writes) for n in written_inputs(node)]
    return [node for node in dict.fromkeys(written) if node.op == "placeholder"]


def alias_chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node and what it aliases, up to the storage's owner: `t, t, view, view, wait, all-gather`."""
    chain = [node]
    while aliased := aliased_inputs(chain[-1]):
        chain.append(aliased[0])
    return chain


_CARRIES = ("view", "copy", "create", "wait", "collective")


def scales_to_float8(node: torch.fx.Node) -> bool:
    """Whether the node multiplies a tensor by a number for the sake of its cast to float8."""
    if (
        node.target is not torch.ops.aten.mul.Tensor
        or not node.users
        or len(node.all_input_nodes) != 2
    ):
        return False
    values = [n.meta.get("val") for n in (node.all_input_nodes[1], *node.users)]
    number, *casts = values
    return isinstance(number, torch.Tensor) and number.numel() == 1 and all(
        isinstance(v, torch.Tensor) and v.is_floating_point() and v.dtype.itemsize == 1 for v in casts)


class Flow:
    """Where values come from, including buffers that are filled after they are created, as buckets are.

    saved: a backward's saved tensors count as parameters too, since one may be a gathered parameter.
    """

    def __init__(self, gm: Graph, *, saved: bool = False):
        self.owner = roots(gm)
        self.writers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in calls_of(
            gm.graph, lambda target: writes(target) and collective_kind(target) is None
        ):
            for buffer in written_inputs(node):
                self.writers.setdefault(self.owner[buffer], []).append(node)
        inputs = gm.graph.find_nodes(op="placeholder")
        undescribed = saved or not any("desc" in n.meta for n in inputs)
        self._parameters: dict[torch.fx.Node, frozenset[torch.fx.Node] | None] = {}
        for node in inputs:
            counts = is_parameter(node) or (undescribed and "desc" not in node.meta)
            self._parameters[node] = frozenset([node]) if counts else None

    def sources(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes whose values `node` holds: its inputs, and for a buffer what is written into it."""
        read = list(node.all_input_nodes)[: 1 if scales_to_float8(node) else None]
        for writer in self.writers.get(node, ()):
            filled = {self.owner[n] for n in written_inputs(writer)}
            read += [n for n in writer.all_input_nodes if self.owner[n] not in filled]
        return [n for n in read if isinstance(n.meta.get("val"), torch.Tensor | list | tuple)]

    def parameters(self, node: torch.fx.Node) -> frozenset[torch.fx.Node] | None:
        """The parameters whose values `node` holds, through views, casts, pads, collectives and bucketing alone.
        The scale of a cast to float8 does not count.

        None for a node that holds anything else.
        """
        if node not in self._parameters:
            # a buffer may be reached again through its own writers
            self._parameters[node] = frozenset()
            parts: list[frozenset[torch.fx.Node] | None] = [None]
            if node.op == "call_function" and (
                    kind_of(node) in _CARRIES or aliased_inputs(node) or scales_to_float8(node)):
                parts = [self.parameters(source) for source in self.sources(node)]
            self._parameters[node] = None if None in parts else frozenset().union(*parts)  # type: ignore[arg-type]
        return self._parameters[node]


def parameter_moves(gm: Graph) -> set[torch.fx.Node]:
    """The nodes that hold parameters or saved tensors only: gathers, casts, buckets and views of them."""
    flow = Flow(gm, saved=True)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return {n for n in calls if flow.sources(n) and flow.parameters(n) is not None}


def parameter_gathers(gm: Graph, flow: Flow | None = None) -> list[torch.fx.Node]:
    """The all-gathers of parameters alone (FSDP's), bucketed ones included; not those of activations (TP's)."""
    flow = flow or Flow(gm)
    gathers = calls_of(gm.graph, lambda target: collective_kind(target) == "all_gather")
    return [n for n in gathers if flow.parameters(n)]


@dataclass(frozen=True)
class SavedTensor:
    """One forward output that the backward reads.

    held_bytes: memory that saving it adds: its whole storage, counted once per storage, 0 for the graph's inputs.
    source: file and line of the model's code. policy: the name of its torch.utils.checkpoint.CheckpointPolicy, set by
    a checkpointing pass or, for a collective's result, by the partitioner; "none" without one.
    alias: the chain from the node to its storage's owner. gathered: the all-gather of a parameter whose memory
    (`copied` False), or a plain copy of it (`copied` True), this tensor keeps alive.
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
    """(the parameter gather whose value `node` holds, whether a copy lies between them)."""
    copied, todo, seen = False, [node], {node}
    for current in todo:
        if current in gathers:
            return current, copied
        sources = aliased_inputs(current)
        if not sources and current.op == "call_function" and kind_of(current) in ("copy", "view", "create"):
            copied, sources = True, flow.sources(current)
        todo += [source for source in sources if source not in seen]
        seen.update(sources)
    return None, False


def saved_tensors(forward: Graph, backward: Graph) -> list[SavedTensor]:
    """The tensors that the forward saves for the backward: its last outputs, one for each backward input but tangents.

    Values that are not tensors are left out.
    """
    flow = Flow(forward)
    gathers = set(parameter_gathers(forward, flow))
    counted, rows = set(), []
    holder = item_roots(forward, flow.owner)
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    outputs = output_values(forward)
    saved = [n for n in outputs[len(outputs) - len(taken):] if isinstance(n, torch.fx.Node)]
    for node in dict.fromkeys(saved):
        value, root = node.meta.get("val"), flow.owner[node]
        if not isinstance(value, torch.Tensor):
            continue
        adds = root.op != "placeholder" and holder[node] not in counted
        counted.add(holder[node])
        gather, copied = _gather_behind(node, gathers, flow)
        rows.append(SavedTensor(
            node.name, tuple(int(s) if isinstance(s, int) else -1 for s in value.shape),
            str(value.dtype).removeprefix("torch."), tensor_bytes(value),
            own_bytes(holder[node]) if adds else 0, module_path(node),
            provenance(node).place, getattr(node.meta.get("recompute"), "name", "none"), root.name,
            tuple(n.name for n in alias_chain(node)),
            gather.name if gather is not None else None, copied,
        ))
    return rows


def gathered_parameters_kept(forward: Graph, backward: Graph) -> list[SavedTensor]:
    """Saved tensors that keep the memory of a gathered parameter alive."""
    return [row for row in saved_tensors(forward, backward) if row.gathered and not row.copied]
