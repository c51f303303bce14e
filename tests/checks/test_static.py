"""What the light checks read from graphs, kept for one run."""

from __future__ import annotations

from graphs_by_hand import named, two_layer_graph

from workbench.checks import memory
from workbench.checks.static import Seen
from workbench.graph.read.snapshot import snapshot
from workbench.torch_api.aot import clone


def test_each_graph_is_read_once_and_what_was_read_can_be_dropped(fake4):
    reads = []

    def read(gm):
        reads.append(gm)
        return len(gm.graph.nodes)

    seen, first, second = Seen(), two_layer_graph(), two_layer_graph()
    assert seen(read, first) == seen(read, first) == len(first.graph.nodes) and reads == [first]
    seen(read, second)
    kept = seen.of((second,))
    kept(read, second)
    assert reads == [first, second]
    kept(read, first)
    assert reads == [first, second, first]


def test_what_was_read_before_a_pass_that_only_tags_holds_after_it(fake4):
    seen, before = Seen(), two_layer_graph()
    tagged, changed = clone(before), clone(before)
    relu, = named(changed, "aten.relu")
    relu.target = None
    seen.carry((before,), (tagged,))
    assert seen(snapshot, tagged) is seen(snapshot, before)
    assert seen(memory.estimate, (tagged,)) is seen(memory.estimate, (before,))
    seen.carry((before,), (changed,))
    relu.target = named(before, "aten.relu")[0].target
    assert seen(snapshot, changed) is not seen(snapshot, before)
