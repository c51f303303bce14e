"""The analyses on a captured llama3: what graphs by hand do not have."""

import pytest
from graphs_by_hand import storage_roots

from workbench import author, capture, fake_world, find_nodes, load_recipe, partition
from workbench.graph.read.collectives import exposed_in_node_order, launches, list_collectives
from workbench.graph.read.memory import gathered_parameters_kept, parameter_gathers, saved_tensors
from workbench.graph.read.nodes import nodes_from_line, provenance
from workbench.torch_api.aot import clone

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def graphs():
    """(joint, forward, backward) of one layer on dp_shard 2 x tp 2."""
    recipe = load_recipe("llama3").override({"model.n_layers": 1, "mesh.dp_shard": 2, "mesh.tp": 2})
    with fake_world(4) as world:
        captured = capture(author(recipe, world))
        joint = clone(captured.graph)
        pair = partition(captured)
        yield joint, pair.forward, pair.backward


def test_gathered_weights_are_kept_through_views_and_both_tests_agree(graphs):
    _, forward, backward = graphs
    gathers, kept = parameter_gathers(forward), gathered_parameters_kept(forward, backward)
    assert len(gathers) == 3 + 9 and len({row.gathered for row in kept}) == len(gathers) - 1
    saved_waits = [row for row in kept if row.name.startswith("wait")]
    assert len(saved_waits) < len(kept) / 3, "most are saved as views: looking for waits alone finds few"
    by_name = {n.name: n for n in forward.graph.nodes}
    storage = storage_roots(forward)
    gathered = {storage[user] for g in gathers for user in g.users}
    assert {r.name for r in saved_tensors(forward, backward) if storage[by_name[r.name]] in gathered} == {
        r.name for r in kept}


def test_every_collective_has_an_axis_and_nothing_hides_the_gathers(graphs):
    _, forward, _ = graphs
    found = list_collectives(forward)
    assert launches(found)["all_gather", "dp_shard"] == 12
    assert {c.axis for c in found} == {"dp_shard", "tp"}
    assert launches(exposed_in_node_order(forward))["all_gather", "dp_shard"] == 12


def test_a_line_and_a_module_find_their_nodes_in_both_directions(graphs):
    joint, _, _ = graphs
    inside = find_nodes(joint, module="layers.0.attention")
    found = [provenance(n) for n in inside]
    assert {p.backward for p in found} == {True, False}
    line = next(p for p in found if p.backward and p.file.endswith("llama3.py"))
    again = nodes_from_line(joint, "llama3.py", line.line)
    assert {provenance(n).backward for n in again} == {True, False}
    parameters = {provenance(n).parameter for n in joint.graph.find_nodes(op="placeholder")}
    assert "layers.0.attention.wq.weight" in parameters
