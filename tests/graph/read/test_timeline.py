"""The simulated timeline, on graphs whose times are written by hand."""

import operator
from dataclasses import replace

import torch
from torch.fx import Graph

from workbench.graph.read.cost import DEVICES
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


ORDERS = [
    ("Ssab", 9.0, 4.0),  # nothing between
    ("Sasb", 7.0, 2.0),  # a hides half of it
    ("Sabs", 5.0, 0.0),
    ("STab" + "st", 8.0, 3.0),  # one after the other on one group
    ("SUab" + "su", 5.0, 0.0),  # side by side on two
    ("aSbs", 6.0, 1.0),
    ("aBb", 9.0, 4.0),
    ("SaBbs", 11.0, 6.0),  # it queues behind S, and s finds S done
]


def test_compute_stands_still_for_what_is_not_there_yet():
    for order, total, exposed in ORDERS:
        found = simulate(*chain(order))
        assert (order, found.now, found.exposed_ms) == (order, total, exposed)
        assert found.now == found.compute_ms + found.exposed_ms


DELAYS = [
    ("Sps", 0.0, 4.0, 2.0, ""), ("Sps", 1.0, 6.0, 4.0, "S"), ("Sps", 0.5, 5.0, 3.0, "S"),
    ("pSs", 1.0, 6.0, 4.0, ""),  # the product has ended
    ("Scps", 1.0, 4.0, 1.0, ""),  # a kernel in between lets it begin
    ("Sppps", 1.0, 6.0, 0.0, "S"),  # one product delays it, and the next ones run beside it
    ("STppppst", 1.0, 12.0, 4.0, "ST"),  # T begins behind S, while a product runs, and waits for that one's end
]


def test_a_collective_waits_for_the_product_that_starts_with_it():
    for order, delays, total, exposed, delayed in DELAYS:
        found, starts = delayed_by(order, delays)
        assert (order, found.now, found.exposed_ms) == (order, total, exposed)
        assert found.delayed == {starts[k] for k in delayed}


def delayed_by(order, delays):
    """p: products of 2 ms; c: another kernel, of 1 ms; S and T: collectives of 4 ms on one group."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes, compute, waits = [], {}, {}
    starts = {k: graph.call_function(operator.neg, (x,)) for k in "ST"}
    for letter in order:
        target = torch.ops.aten.mm.default if letter == "p" else operator.neg
        nodes.append(starts.get(letter) or graph.call_function(target, (x, x) if letter == "p" else (x,)))
        compute[nodes[-1]] = {"p": 2.0, "c": 1.0}.get(letter, 0.0)
        if letter in "st":
            waits[nodes[-1]] = starts[letter.upper()]
    launched = {n: 4.0 for k, n in starts.items() if k in order}
    spec = replace(DEVICES["h100"], product_delays=delays)
    return simulate(nodes, Costs(compute, launched, dict.fromkeys(launched, "g"), waits, spec)), starts
