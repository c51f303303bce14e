"""The simulated timeline, on graphs whose times are written by hand."""

from __future__ import annotations

import operator

import pytest
from torch.fx import Graph

from workbench.graph.read.timeline import Costs, simulate


def chain(order: str) -> tuple[list, Costs]:
    """Nodes by letter: a, b of 2 and 3 ms; S and T start on one group, 4 ms each, U on another; s, t, u wait.

    B is on the first group, too, and blocks.
    """
    graph = Graph()
    x = graph.placeholder("x")
    nodes = {letter: graph.call_function(operator.neg, (x,)) for letter in "abSTUBstu"}
    collectives = {nodes[k]: 4.0 for k in "STUB"}
    compute = {n: 0.0 for n in nodes.values()} | {nodes["a"]: 2.0, nodes["b"]: 3.0}
    groups = {nodes[k]: "g" for k in "STB"} | {nodes["U"]: "other"}
    return [nodes[k] for k in order], Costs(compute, collectives, groups, {nodes[k]: nodes[k.upper()] for k in "stuB"})


@pytest.mark.parametrize(("order", "total", "exposed"), [
    ("Ssab", 9.0, 4.0),  # nothing between
    ("Sasb", 7.0, 2.0),  # a hides half of it
    ("Sabs", 5.0, 0.0),
    ("STab" + "st", 8.0, 3.0),  # one after the other on one group
    ("SUab" + "su", 5.0, 0.0),  # side by side on two
    ("aSbs", 6.0, 1.0),
    ("aBb", 9.0, 4.0),
    ("SaBbs", 11.0, 6.0),  # it queues behind S, and s finds S done
])
def test_compute_stands_still_for_what_is_not_there_yet(order, total, exposed):
    found = simulate(*chain(order))
    assert (found.now, found.exposed_ms) == (total, exposed)
    assert found.now == found.compute_ms + found.exposed_ms
