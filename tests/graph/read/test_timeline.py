"""The simulated timeline, on graphs whose times are written by hand."""

import operator
from dataclasses import replace

import torch
from torch.fx import Graph

from workbench.graph.read.cost import DEVICES
from workbench.graph.read.timeline import Costs, simulate

MS = {"a": 2.0, "b": 3.0, "p": 2.0, "c": 1.0}


def run(order, delays=0.0):
    """The run of nodes by letter, and the collectives.

    a, b: kernels of 2 and 3 ms; p, c: a product of 2 and a kernel of 1 ms. S and T start on one group, 4 ms each, U on
    another; s, t, u wait. B is on the first group, too, and blocks. delays: of products, as a machine has them.
    """
    graph = Graph()
    x = graph.placeholder("x")
    nodes, compute, waits = [], {}, {}
    starts = {letter: graph.call_function(operator.neg, (x,)) for letter in "STUB"}
    for letter in order:
        target, inputs = (torch.ops.aten.mm.default, (x, x)) if letter == "p" else (operator.neg, (x,))
        nodes.append(starts.get(letter) or graph.call_function(target, inputs))
        compute[nodes[-1]] = MS.get(letter, 0.0)
        if letter in "stuB":
            waits[nodes[-1]] = starts[letter.upper()]
    launched = {node: 4.0 for letter, node in starts.items() if letter in order}
    groups = {node: "other" if node is starts["U"] else "g" for node in launched}
    spec = replace(DEVICES["h100"], product_delays=delays)
    return simulate(nodes, Costs(compute, launched, groups, waits, spec)), starts


ORDERS = [
    ("Ssab", 9.0, 4.0),  # nothing between
    ("Sasb", 7.0, 2.0),  # a hides half of it
    ("Sabs", 5.0, 0.0),
    ("STab" + "st", 8.0, 3.0),  # one after the other on one group
    ("SUab" + "su", 5.0, 0.0),  # side by side on two
    ("aSbs", 6.0, 1.0),
    ("aBb", 9.0, 4.0),
    ("SaBbs", 11.0, 6.0),  # it queues behind S, and s finds S done
    ("Sps", 4.0, 2.0),
]


def test_compute_stands_still_for_what_is_not_there_yet():
    for order, total, exposed in ORDERS:
        found, _ = run(order)
        assert (order, found.now, found.exposed_ms, found.delayed) == (order, total, exposed, set())
        assert found.now == found.compute_ms + found.exposed_ms


DELAYS = [
    ("Sps", 1.0, 6.0, 4.0, "S"), ("Sps", 0.5, 5.0, 3.0, "S"),
    ("pSs", 1.0, 6.0, 4.0, ""),  # the product has ended
    ("Scps", 1.0, 4.0, 1.0, ""),  # a kernel in between lets it begin
    ("Sppps", 1.0, 6.0, 0.0, "S"),  # one product delays it, and the next ones run beside it
    ("STppppst", 1.0, 12.0, 4.0, "ST"),  # T begins behind S, while a product runs, and waits for that one's end
]


def test_a_collective_waits_for_the_product_that_starts_with_it():
    for order, delays, total, exposed, delayed in DELAYS:
        found, starts = run(order, delays)
        assert (order, found.now, found.exposed_ms) == (order, total, exposed)
        assert found.delayed == {starts[letter] for letter in delayed}
