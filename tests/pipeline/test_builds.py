"""Graphs as large as before, against committed rows."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import load_recipe
from workbench.pipeline.run_passes import copy_graph
from workbench.torch_api.ops import collective_kind

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from builds import GOLDEN, sizes_of, sizes_of_recipe  # noqa: E402

BUILDS = json.loads((ROOT / "benchmarks/results/builds.json").read_text())
same_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0] != BUILDS["versions"]["torch"].split("+")[0],
    reason="another torch makes other graphs than those of the committed rows",
)


@same_torch
def test_a_build_has_the_nodes_and_launches_of_before(tour: Any) -> None:
    assert sizes_of(tour.step.pair.by_part) == BUILDS["recipes"]["tour, 1 layer"]


@same_torch
@pytest.mark.nightly
@pytest.mark.parametrize("name", GOLDEN)
def test_each_build_has_the_nodes_and_launches_of_before(name: str) -> None:
    assert sizes_of_recipe(load_recipe(name)) == BUILDS["recipes"][name]


def test_one_more_launch_is_seen(tour: Any) -> None:
    graphs = {part: copy_graph(graph) for part, graph in tour.step.pair.by_part.items()}
    before, forward = sizes_of(graphs), graphs["forward"].graph
    launch = next(n for n in forward.nodes if collective_kind(n.target) is not None)
    with forward.inserting_after(launch):
        forward.node_copy(launch, lambda node: node)
    more = {"nodes": before["forward"]["nodes"] + 1, "launches": before["forward"]["launches"] + 1}
    assert sizes_of(graphs) == before | {"forward": more}
