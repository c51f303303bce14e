"""All that a graph records about one node, as rows for a reader."""

from __future__ import annotations

import linecache

import torch
from torch.fx import Node

from workbench.graph.read.collectives import axis_names
from workbench.graph.read.cost import device_spec, node_ms
from workbench.graph.read.nodes import described, kind_of, provenance
from workbench.recipe.wording import few
from workbench.torch_api.ops import argument, collective_kind, group_name_of, op_name, tensor_bytes

DEVICE = "h100"
"""Whose costs are estimated."""


def node_facts(node: Node) -> list[tuple[str, str]]:
    """(name, value) rows of a node: operator, shape, dtype, bytes, estimated cost, origin, neighbours."""
    value, where = node.meta.get("val"), provenance(node)
    rows = [
        ("operator", op_name(node.target) if node.op == "call_function" else node.op),
        ("kind", kind_of(node)),
        ("result", described(value)),
    ]
    if tensor_bytes(value):
        rows.append(("bytes", f"{tensor_bytes(value):,}"))
    if isinstance(value, torch.Tensor) and (ms := node_ms(node, DEVICE)):
        spec = device_spec(DEVICE)
        rows.append((f"cost on {spec.name}", f"{ms * 1e3:,.3f} µs, estimated, {spec.trust}"))
    if collective_kind(node.target):
        group = group_name_of(node)
        owner = node.graph.owning_module
        axis = axis_names(owner).get(group, group) if owner else group
        size = argument(node, "group_size")
        rows.append(("over", axis + (f", {size} ranks" if isinstance(size, int) else "")))
    if where.parameter:
        rows.append(("parameter", where.parameter))
    if "desc" in node.meta:
        rows.append(("descriptor", str(node.meta["desc"])))
    rows.append(("module", where.module or "not recorded"))
    line = linecache.getline(where.file, where.line).strip() if where.file else ""
    rows.append(
        ("source", f"{where.place}: {line or where.text}" if where.file else "not recorded")
    )
    if tag := getattr(node.meta.get("recompute"), "name", ""):
        rows.append(("policy", tag))
    for name, nodes in (("reads", node.all_input_nodes), ("read by", node.users)):
        rows.append((name, few([n.name for n in nodes], 8) or "nothing"))
    return rows
