"""The same cut as networkx finds, on graphs of all kinds, and on a long one in time that follows its length."""

from __future__ import annotations

import math
import random

import networkx
import pytest

from workbench.torch_api import fast_partition
from workbench.torch_api.fast_partition import minimum_cut

by_networkx = networkx.minimum_cut


def any_graph(seed: int) -> networkx.DiGraph:
    """A few nodes; a third of the edges may not be cut."""
    draw = random.Random(seed)
    graph = networkx.DiGraph()
    nodes = ["source", "sink", *range(draw.randint(2, 12))]
    graph.add_nodes_from(nodes)
    for _ in range(draw.randint(1, 4 * len(nodes))):
        graph.add_edge(*draw.sample(nodes, 2))  # no capacity: no limit
        u, v = draw.sample(nodes, 2)
        graph.add_edge(u, v, capacity=draw.choice([*range(9), math.inf]))
        graph.add_edge(*draw.sample(nodes, 2), capacity=draw.randint(0, 9))
    return graph


def test_the_cut_of_networkx():
    found = unbounded = 0
    for seed in range(600):
        graph = any_graph(seed)
        try:
            value, sides = by_networkx(graph, "source", "sink")
        except networkx.NetworkXUnbounded:
            unbounded += 1
            with pytest.raises(networkx.NetworkXUnbounded):
                minimum_cut(graph, "source", "sink")
            continue
        found += value > 0
        assert minimum_cut(graph, "source", "sink") == (value, tuple(map(set, sides))), seed
    assert found > 100 and unbounded > 100


def test_of_two_cuts_that_cost_the_same_the_last_one():
    graph = networkx.DiGraph()
    graph.add_weighted_edges_from([("source", "a", 2), ("a", "b", 3), ("b", "sink", 2)], weight="capacity")
    assert minimum_cut(graph, "source", "sink") == (2, ({"source", "a", "b"}, {"sink"}))


def test_each_dead_end_is_searched_once(monkeypatch):
    """A comb: all teeth enter one way, and its end holds little."""
    graph = networkx.DiGraph()
    teeth, seen, search = 300, 0, fast_partition._search

    def counted(*args):
        nonlocal seen
        found = search(*args)
        seen += len(found)
        return found

    for i in range(teeth):
        graph.add_edge("source", ("tooth", i), capacity=5)
        graph.add_edge(("tooth", i), ("back", i), capacity=5)
        graph.add_edge(("back", i), ("back", i + 1), capacity=5 * teeth)
    graph.add_edge(("back", teeth), "sink", capacity=7)
    monkeypatch.setattr(fast_partition, "_search", counted)
    value, (_, behind) = minimum_cut(graph, "source", "sink")
    assert (value, behind) == (7, {"sink"})
    assert seen < 6 * teeth
