"""Process groups under chosen names, so that an artifact finds the groups that it names.

Source: torch/csrc/distributed/c10d/GroupRegistry.cpp, through its Python binding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch._inductor.fx_passes.bucketing  # registers the operators of bucketed collectives
import torch.distributed._symmetric_memory  # noqa: F401  registers operators that send while they multiply
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.torch_api.ops import OPERATORS, argument


def alias_groups(groups: dict[str, str]) -> None:
    """Let each of these names find the process group that has the name on its right. A group that had it loses it."""
    for name, group in groups.items():
        resolved = _resolve_process_group(group)  # type: ignore[arg-type]
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(name)  # type: ignore[arg-type]
        _register_process_group(name, resolved)  # type: ignore[arg-type]


def rename_groups(graph: GraphModule, names: Mapping[str, str]) -> None:
    """Write the name of each collective's process group in its place. names: by the group's own.

    Raises WorkbenchError for a group that has none, and for one that is a value of the graph.
    """
    for node in graph.graph.nodes:
        group = argument(node, "group_name") if isinstance(node.target, OPERATORS) else None
        if group is None:
            continue
        if not isinstance(group, str) or group not in names:
            raise WorkbenchError(
                f"{node.name}, {node.target}, runs over process group {group}, which is "
                "neither a mesh axis nor all ranks: no other rank can find it by name"
            )
        name = names[group]
        node.args = tuple(name if value == group else value for value in node.args)
        if "group_name" in node.kwargs:
            node.kwargs = {**node.kwargs, "group_name": name}
    graph.recompile()
