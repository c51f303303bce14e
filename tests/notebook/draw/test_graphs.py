"""A graph's picture counts what is in it; a table of saved tensors shows what keeps a gathered weight alive."""

from __future__ import annotations

from collections import Counter

import pytest

from workbench import author, build, capture, fake_world, load_recipe, partition
from workbench.graph.read.nodes import kind_of
from workbench.notebook import draw
from workbench.pipeline.build import Built

pytestmark = pytest.mark.integration
RECIPE = load_recipe("llama3_block_bucketing").override({"model.n_layers": 1, "mesh.tp": 2})


@pytest.fixture(scope="module")
def built() -> Built:
    with fake_world(4) as world:
        return build(RECIPE, world)


def test_a_joint_graph_in_both_directions(built: Built) -> None:
    picture = draw.graph(built.captured, "captured")
    calls = [n for n in built.captured.graph.nodes if n.op == "call_function"]
    backward = [n for n in calls if n.meta.get("partitioner_tag") == "is_backward"]
    lines = picture.text.splitlines()
    assert lines[0] == (f"captured: {len(calls)} operators, {len(calls) - len(backward)} forward and "
                        f"{len(backward)} backward")
    later = Counter(map(kind_of, backward))
    assert f"matmul: 8 forward, {later['matmul']} backward" in lines and later["matmul"] == 16


def test_saved_tensors_and_the_views_of_gathered_weights() -> None:
    with fake_world(4) as world:
        pair = partition(capture(author(RECIPE, world)))
    every, kept = draw.saved(pair), draw.saved(pair, gathered=True)
    assert {row[5] for row in every.rows} == {"an activation", "a gathered parameter"}
    sizes = [row[3] for row in every.rows]
    assert sizes == sorted(sizes, reverse=True) and 0 not in sizes
    assert {row[0] for row in kept.rows} == {row[0] for row in every.rows if row[5] == "a gathered parameter"}
    assert any(" > t" in row[-1] and "all_gather" in row[-1] for row in kept.rows)
    few = draw.saved(pair, least=sizes[3])
    assert [row[3] for row in few.rows] == [s for s in sizes if s >= sizes[3]]
    assert f"of {sum(sizes):,} bytes" in few.notes[0]
