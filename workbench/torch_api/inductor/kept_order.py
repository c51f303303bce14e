"""Let Inductor call kernels in the order of the graph: its scheduler's nodes are sorted accordingly after fusion.

After fusion, Inductor sorts depth first, which moves waits back to their collectives. And it fuses kernels that lie far
apart, for what they read in common: a gradient of the first layer then comes with one of the last, after the products
that its collective was to hide behind. Such fusions are refused. Source: torch/_inductor/scheduler.py
(`Scheduler._init`, which calls `_post_fusion_custom_pass`, and `Scheduler.can_fuse`, which asks `V.choices`),
torch/_inductor/memory.py (`reorder_for_peak_memory`) and torch/_inductor/comms.py (`simple_overlap`, in torch 2.14 and
later), which come later and must be off, torch/_inductor/codecache.py (which caches code only if the pass is a
`CustomSchedulerPass` with a uuid).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import networkx as nx
from torch._inductor import config, custom_graph_pass
from torch._inductor.choices import InductorChoices
from torch.fx import Node


class KeptOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """Sorts the scheduler's nodes by dependency, and then by the last graph node that each computes."""

    def uuid(self) -> str:
        """For Inductor's cache. The order depends on the graph only, which is part of the key."""
        return "workbench: order of the graph, 2"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        place, needs = _places(), _needs(nodes)
        keys = [(_last_origin(node, place), i) for i, node in enumerate(nodes)]
        return [nodes[i] for i in nx.lexicographical_topological_sort(needs, keys.__getitem__)]


class KeptFusions(InductorChoices):
    """Refuses to fuse a kernel with one that comes only after a collective which waits for the first.

    Between the two may lie the products behind which the collective hides.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: Any = None
        self._last: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:  # type: ignore[override]
        """Called by the scheduler for each two nodes that could become one kernel."""
        if not InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score):
            return False
        if self._of is not scheduler:
            self._read(scheduler)
        (last1, due1), (last2, due2) = self._span(node1), self._span(node2)
        return not (last1 < due1 <= last2 or last2 < due2 <= last1)

    def _span(self, node: Any) -> tuple[int, int]:
        """The last graph node that it computes, and the first collective that waits for any of it: positions."""
        names = [part.get_name() for part in node.get_nodes()]
        return max(self._last[name] for name in names), min(self._due[name] for name in names)

    def _read(self, scheduler: Any) -> None:
        from torch._inductor.utils import is_collective

        self._of, place = scheduler, _places()
        nodes = [part for node in scheduler.nodes for part in node.get_nodes()]
        needs, names = _needs(nodes), [part.get_name() for part in nodes]
        self._last = {
            name: _last_origin(part, place) for name, part in zip(names, nodes, strict=True)
        }
        first = {name: self._last[name] if is_collective(part.node) else len(place)
                 for name, part in zip(names, nodes, strict=True)}
        self._due = {}
        for i in reversed(list(nx.topological_sort(needs))):
            users = [names[user] for user in needs.successors(i)]
            self._due[names[i]] = min(
                (min(first[user], self._due[user]) for user in users), default=len(place)
            )


def _places() -> dict[Node, int]:
    """The positions of the nodes of the graph that Inductor compiles now."""
    from torch._inductor.virtualized import V

    return {node: i for i, node in enumerate(V.graph.graph.nodes)}


def _needs(nodes: Sequence[Any]) -> nx.DiGraph[int]:
    """An edge from each of the scheduler's nodes to those that need its buffers; by position in `nodes`."""
    maker = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    needs: nx.DiGraph[int] = nx.DiGraph()
    needs.add_nodes_from(range(len(nodes)))
    needs.add_edges_from(
        (maker[d.name], i)
        for i, node in enumerate(nodes)
        for d in node.unmet_dependencies
        if maker.get(d.name, i) != i
    )
    return needs


def _last_origin(node: Any, place: Mapping[Node, int]) -> int:
    """The position of the last graph node that this scheduler node computes; after all others if there is none."""
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    return max(
        (place[o] for part in parts for o in part.get_origins() if o in place), default=len(place)
    )


def graph_order() -> dict[str, Any]:
    """Options of Inductor that keep the order of the graph, together with `kept_fusions`."""
    options = {"reorder_for_peak_memory": False, "_post_fusion_custom_pass": KeptOrder()}
    if hasattr(config.aten_distributed_optimizations, "enable_simple_overlap"):
        options["aten_distributed_optimizations.enable_simple_overlap"] = False
    return options


def kept_fusions() -> AbstractContextManager[None]:
    """Inside, Inductor makes no fusion that would delay a collective."""
    from torch._inductor.virtualized import V

    handler: AbstractContextManager[None] = V.set_choices_handler(KeptFusions())
    return handler
