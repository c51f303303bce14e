"""Let Inductor call kernels in the order of the graph: its scheduler's nodes are sorted accordingly after fusion.

After fusion, Inductor sorts depth first, which moves waits back to their collectives. Source:
torch/_inductor/scheduler.py (`Scheduler._init`, which calls `_post_fusion_custom_pass`), torch/_inductor/memory.py
(`reorder_for_peak_memory`, which comes later and must be off), torch/_inductor/codecache.py (which caches code only if
the pass is a `CustomSchedulerPass` with a uuid).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx as nx
from torch._inductor import custom_graph_pass
from torch.fx import Node

from workbench.errors import WorkbenchError


class KeptOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """Sorts the scheduler's nodes by dependency, and then by the last graph node that each computes."""

    def uuid(self) -> str:
        """For Inductor's cache. The order depends on the graph only, which is part of the key."""
        return "workbench: order of the graph, 1"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.virtualized import V

        place: dict[Node, int] = {node: i for i, node in enumerate(V.graph.graph.nodes)}
        maker = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
        needs = nx.DiGraph()
        needs.add_nodes_from(range(len(nodes)))
        needs.add_edges_from((maker[d.name], i) for i, node in enumerate(nodes) for d in node.unmet_dependencies
                             if maker.get(d.name, i) != i)
        keys = [(_last_origin(node, place), i) for i, node in enumerate(nodes)]
        try:
            return [nodes[i] for i in nx.lexicographical_topological_sort(needs, keys.__getitem__)]
        except nx.NetworkXUnfeasible:
            raise WorkbenchError("full_inductor_compilation: some of Inductor's kernels wait for each other: set "
                                 "keep_order = false") from None


def _last_origin(node: Any, place: Mapping[Node, int]) -> int:
    """The position of the last graph node that this scheduler node computes; after all others if there is none."""
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    return max((place[o] for part in parts for o in part.get_origins() if o in place), default=len(place))


def graph_order() -> dict[str, Any]:
    """Options of Inductor that keep the order of the graph, as far as fusion allows."""
    return {"reorder_for_peak_memory": False, "_post_fusion_custom_pass": KeptOrder()}
