"""What a run has learned, and what was read from its graphs."""

import gc
import weakref

from graphs_by_hand import two_layer_graph

from workbench import Effect, Numerics, Outcome, PassContract, PassRecord, Stage
from workbench.graph.facts import Known, reading
from workbench.passes.registry import RegisteredPass


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


def test_a_pass_that_only_tags_is_judged_by_the_partition_of_its_own_run(fake4):
    graph, known = two_layer_graph(), Known()
    contract = PassContract("tags", Stage.JOINT, Numerics.EXACT, "")
    item = RegisteredPass(contract, print, lambda *_: Effect(True, "", {"tagged": 1}),
                          lambda graphs, options: Effect(len(graphs) == 2, f"{len(graphs)} graphs"))
    record = PassRecord(item, None, (graph,), (graph,), 0.0, 0.0, known)
    known.records.append(record)
    forks = known.fork(), known.fork()
    forks[0].partitioned, forks[1].partitioned = (graph, graph), (graph,)
    both, one, again = (fork.records[0].verdict("effect") for fork in (*forks, forks[0].fork()))
    assert both.outcome is again.outcome is Outcome.PASS and both.evidence == {"tagged": 1}
    assert one.outcome is Outcome.NO_EFFECT and one.message == "1 graphs"
    assert record.verdict("effect").outcome is Outcome.UNKNOWN
