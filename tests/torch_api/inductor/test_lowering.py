"""What Inductor is told of a graph before it compiles it."""

from __future__ import annotations

from workbench import author, capture, fake_world, load_recipe, partition
from workbench.torch_api.inductor.lowering import visible_outputs


def test_a_gradient_that_is_none_is_not_a_visible_output() -> None:
    recipe = load_recipe("llama3").override({"mesh.dp_shard": 2, "mesh.tp": 2, "model.n_layers": 1})
    with fake_world(4) as world, capture(author(recipe, world)) as joint:
        backward = partition(joint).backward
    outputs = backward.graph.output_node().args[0]
    nodes = [i for i, output in enumerate(outputs) if output is not None]
    assert 0 < len(nodes) < len(outputs)  # a mesh has no gradient
    assert visible_outputs(backward, len(outputs)) == nodes
    assert visible_outputs(backward, nodes[1]) == nodes[:1]
