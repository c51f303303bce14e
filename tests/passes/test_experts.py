"""Passes on graphs with experts: what they leave alone, and what they refuse."""

import pytest
from on_ranks import calls, user_pass

from workbench import WorkbenchError, author
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.cost import flops
from workbench.recipe.recipe import RecipeError, load_recipe
from workbench.torch_api.inductor.regions import region_of

pytestmark = pytest.mark.integration
BLOCKS = "transformer_block_bucketing"


def recipe(dispatch: str):
    return load_recipe("deepseek_v3").override({
        "mesh": {"dp_shard": 4, "ep": 2}, "model.n_layers": 2, "model.dispatch": dispatch,
        "model.capacity_factor": 1.0, "data.seq_len": 16})


@pytest.fixture(scope="module")
def authored(fake4):
    """The model of a dispatch, of which `through` keeps the capture."""
    return {dispatch: author(recipe(dispatch), fake4) for dispatch in ("dropless", "capacity")}


@pytest.fixture(scope="module")
def captured(authored, through):
    """The dropless joint graph."""
    return through(authored["dropless"])[2]


def test_a_pair_whose_sizes_a_step_decides_has_a_repr(authored, through):
    _, pair, _ = through(authored["dropless"])
    assert repr(pair).startswith("ForwardBackward(deepseek_v3: forward ")


def exchanges(graphs):
    """The all-to-alls of each graph in order: group, shape of what is sent, and module."""
    found = [[c for c in list_collectives(g) if c.kind == "all_to_all"] for g in graphs]
    return [[(c.axis, c.shape, c.module) for c in graph] for graph in found]


def test_bucketing_leaves_every_exchange_in_its_place(authored, through):
    _, plain, _ = through(authored["capacity"])
    records, pair, _ = through(authored["capacity"], (), [BLOCKS])
    assert exchanges(pair.graphs) == exchanges(plain.graphs) and all(exchanges(pair.graphs))
    assert all(axis == "ep" for graph in exchanges(pair.graphs) for axis, _, _ in graph)
    assert {str(v.outcome) for v in records[BLOCKS].verdicts} == {"PASS"}


def test_regions_are_named_in_forward_and_backward(captured):
    for tag in ("is_forward", "is_backward"):
        named = {region_of(n) for n in captured.graph.nodes if n.meta.get("partitioner_tag") == tag}
        assert {"dispatch", "compute", "combine", "norm", "feed_forward"} <= named
    inside = {region_of(n) for n in calls(captured, "_c10d_functional.all_to_all_single")}
    assert inside == {"dispatch", "combine"}


def test_what_needs_static_shapes_is_refused_for_dropless():
    for name in ("full_inductor_compilation", "cudagraph"):
        given = {"passes": [name], "joint_passes": ["inductor_decomposition"]}
        with pytest.raises(RecipeError, match=f"{name}.*dropless dispatch reads them.*: set model.dispatch"):
            recipe("dropless").override(given)
        recipe("capacity").override(given)


def test_a_graph_that_reads_sizes_is_refused_by_its_node(authored, through):
    with (user_pass("own_static", lambda gm: gm, needs={"static_shapes"}) as name,
          pytest.raises(WorkbenchError, match=r"layers\.1\.moe.*read from the device: give it a static size")):
        through(authored["dropless"], [name])


def test_sizes_that_are_read_in_a_step_count_as_an_even_load_has_them(authored, captured, through):
    even = through(authored["capacity"])[2]
    assert sum(flops(captured).values()) == sum(flops(even).values())
    static = [c.payload for c in list_collectives(even) if c.kind == "all_to_all"]
    (_, *read) = [c.payload for c in list_collectives(captured) if c.kind == "all_to_all"]  # the first sends counts
    assert read == static
