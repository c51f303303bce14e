"""What a run has learned, and what was read from its graphs."""

from __future__ import annotations

import gc
import weakref

from graphs_by_hand import two_layer_graph

from workbench.graph.facts import Known, reading


def test_a_graph_is_read_once_and_can_be_freed(fake4):
    reads = []

    def nodes(*graphs):
        reads.append(graphs)
        return sum(len(graph.graph.nodes) for graph in graphs)

    first, second = two_layer_graph(), two_layer_graph()
    assert reading(nodes, first) == reading(nodes, first) == len(first.graph.nodes) and reads == [(first,)]
    assert reading(nodes, first, second) == reading(nodes, first) + reading(nodes, second)
    assert reads == [(first,), (first, second), (second,)]
    gone = weakref.ref(first)
    reads.clear()
    del first
    gc.collect()
    assert gone() is None


def test_a_fork_learns_for_itself():
    known = Known(microbatches=2)
    asked = []
    other = known.fork()
    assert other.reading(asked.append) is None and known.reading(asked.append) is None
    assert asked == [other, known] and known.reading(asked.append) is None and len(asked) == 2
    other.no_values = "none"
    assert known.no_values == "" and other.microbatches == 2
