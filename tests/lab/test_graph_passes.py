"""A pass as a plain function of a graph."""

import pytest
from on_ranks import FSDP_TP, small

from workbench import Outcome, WorkbenchError, author, capture, fake_world, partition
from workbench.checks.record import TAGS
from workbench.graph.facts import GraphFacts, set_facts
from workbench.lab.graph_passes.graph_pass import as_graph_pass


@pytest.mark.integration
def test_graphs_that_were_captured_elsewhere_get_the_same_verdicts():
    with fake_world(4) as world:
        joint = capture(author(small(FSDP_TP), world))
        tags = as_graph_pass({"name": "activation_checkpointing", "policy": "full"})
        set_facts(joint.graph, GraphFacts())
        with joint.context():
            joint.graph = tags(joint.graph)
        pair = partition(joint)
        idle = as_graph_pass({"name": "transformer_block_bucketing", "buckets": ("layer.0",)})
        buckets = as_graph_pass({"name": "transformer_block_bucketing", "buckets": ("layers.0",)})
        for graph_pass in (idle, buckets):
            for which in ("forward", "backward"):
                with pair.context(which) as inputs:
                    given = pair.by_part[which]
                    set_facts(given, GraphFacts())
                    text = given.code
                    result = graph_pass(given, inputs)
                    assert given.code == text and result is not given
    told = tags.records[0].verdict("effect")
    assert told.outcome is Outcome.UNKNOWN and told.message == TAGS
    (nothing,), (done,) = idle.records, buckets.records
    assert nothing.verdict("effect").outcome is Outcome.NO_EFFECT
    assert "no module path matches the buckets ['layer.0']" in nothing.verdict("effect").message
    assert done.outcome is Outcome.PASS and done.parts == ("forward", "backward")


def test_what_makes_a_callable_is_no_graph_pass():
    for name in ("full_inductor_compilation", "cudagraph"):
        with pytest.raises(WorkbenchError, match=f"pass '{name}' runs on the .* as_graph_pass, for graphs alone, runs"):
            as_graph_pass(name)
    assert as_graph_pass("graph_cleanup").__name__ == "graph_cleanup"
