"""Process groups under names that are the same on every rank: `axis:dp_shard`, its twin `twin:dp_shard`, `world`.

torch numbers process groups in the order in which a process makes them, so that no two worlds agree on the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.fx import GraphModule

from workbench.authoring.authored import Authored
from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.torch_api.distributed.named_groups import alias_groups
from workbench.torch_api.inductor.bucketing import twin_group
from workbench.torch_api.ops import OPERATORS, argument

_AXIS, _TWIN, _WORLD = "axis:", "twin:", "world"


def rename_groups(graphs: Iterable[GraphModule], authored: Authored) -> list[str]:
    """Write each collective's process group as its name on every rank; returns the names, which this process has too.

    Raises WorkbenchError for a group that belongs to no mesh axis, and for one that is a value of the graph.
    """
    graphs = list(graphs)
    known = _names(authored, {twin for graph in graphs for twin in facts_of(graph).step.gather_groups.items()})
    alias_groups({name: group for group, name in known.items()})
    used: dict[str, None] = {}
    for graph in graphs:
        for node in graph.graph.nodes:
            group = argument(node, "group_name") if isinstance(node.target, OPERATORS) else None
            if group is None:
                continue
            if not isinstance(group, str) or group not in known:
                raise WorkbenchError(f"{node.name}, {node.target}, runs over process group {group}, which is neither a "
                                     "mesh axis nor all ranks: an artifact cannot find it on another rank")
            name = known[group]
            used[name] = None
            node.args = tuple(name if given == group and isinstance(given, str) else given for given in node.args)
            node.kwargs = {key: name if key == "group_name" else given for key, given in node.kwargs.items()}
        facts = facts_of(graph)
        facts.groups = {axis: known.get(group, group) for axis, group in facts.groups.items()}
        facts.group_sizes = {known.get(group, group): size for group, size in facts.group_sizes.items()}
        graph.recompile()
    return list(used)


def find_groups(names: Iterable[str], authored: Authored) -> None:
    """Give this rank's process groups those names. Every rank calls it, in one order: twins are made here."""
    axes = {f"{_AXIS}{axis}": group for axis, group in authored.groups.items()}
    found = {}
    for name in names:
        axis = name.replace(_TWIN, _AXIS, 1)
        if name == _WORLD:
            found[name] = _world()
        elif axis in axes:
            found[name] = twin_group(axes[axis]) if name.startswith(_TWIN) else axes[axis]
        else:
            raise WorkbenchError(f"the artifact's process group {name!r} has no mesh axis here: the mesh has "
                                 f"{', '.join(authored.groups) or 'no axis'}")
    alias_groups(found)


def _names(authored: Authored, twins: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The name on every rank, by this process's."""
    known = {_world(): _WORLD} if dist.is_initialized() else {}
    known |= {group: f"{_AXIS}{axis}" for axis, group in authored.groups.items()}
    return known | {twin: known[group].replace(_AXIS, _TWIN, 1) for group, twin in twins}


def _world() -> str:
    everyone = dist.group.WORLD
    assert everyone is not None
    return str(everyone.group_name)
