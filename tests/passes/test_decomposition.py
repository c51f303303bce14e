"""inductor_decomposition: the same graph at the capture and as a pass, with every node's metadata."""

from collections import Counter

import pytest
import torch

from workbench import Outcome, PassSpec, author_module, capture
from workbench.graph.read.nodes import module_path, provenance
from workbench.pipeline.run_passes import capture_decompositions, run_joint

pytestmark = pytest.mark.integration

NAME = "inductor_decomposition"
AT_CAPTURE = PassSpec(name=NAME, options={"at": "capture"})


def operators(gm):
    return Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_function")


@pytest.fixture(scope="module")
def both(authored, through):
    table = capture_decompositions([AT_CAPTURE])
    return through(authored, [NAME]), through(authored, [AT_CAPTURE], decompositions=table)


def test_the_pass_gives_the_graph_of_the_capture(both):
    (as_pass, pair, joint), (at_capture, other, traced) = both
    assert operators(joint) == operators(traced)
    for a, b in zip(pair.graphs, other.graphs, strict=True):
        assert operators(a) == operators(b)
    for records in (as_pass, at_capture):
        assert records[NAME].outcome is Outcome.PASS
    assert as_pass[NAME].verdict("effect").evidence["replaced"]["aten.t.default"] > 10
    assert at_capture[NAME].verdict("effect").evidence == {"at": "capture", "left": {}}


def test_every_node_keeps_its_metadata(both, authored, through):
    (_, pair, joint), _ = both
    plain = through(authored)[2]
    for gm in (joint, *pair.graphs):
        nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
        assert [n.name for n in nodes if not n.meta.get("stack_trace")] == []
        assert [n.name for n in nodes if not provenance(n).file.endswith(".py")] == []
        if gm is joint:
            assert [n.name for n in nodes if "partitioner_tag" not in n.meta] == []
    modules, kept = ({module_path(n) for n in gm.graph.nodes} for gm in (plain, joint))
    assert kept == modules and "layers.0.attention.wq" in kept
    assert {n.name: n.meta["desc"] for n in joint.graph.find_nodes(op="placeholder")} == \
        {n.name: n.meta["desc"] for n in plain.graph.find_nodes(op="placeholder")}
    joint.graph.lint()


def test_a_capture_without_the_table_is_told(authored, through):
    found = through(authored, [AT_CAPTURE])[0][NAME].verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT
    assert found.message.startswith("the graph was captured without the table, and this pass replaced {'aten.t")


class Dropping(torch.nn.Linear):
    def forward(self, x):
        x = torch.nn.functional.dropout(super().forward(x), 0.5)
        return (x * torch.bernoulli(torch.full_like(x, 0.5))).square().mean()


@pytest.mark.parametrize("spec", [PassSpec(name=NAME), AT_CAPTURE])
def test_random_operators_stay_as_they_are(fake4, spec):
    """Their bodies would draw other numbers than eager: torch.bernoulli's is by rand."""
    with fake4.fake_mode:
        x = torch.empty(4, 8)
    authored = author_module(Dropping(8, 8), fake4, None, batch=lambda: (x,))
    with capture(authored, decompositions=capture_decompositions([spec])) as joint:
        run_joint(joint, [spec])
        after = operators(joint.graph)
    assert after["aten.native_dropout.default"] == after["aten.bernoulli.default"] == 1
