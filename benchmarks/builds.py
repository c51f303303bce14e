"""How large the graphs of each recipe are, as built: nodes, and launches of collectives.

    python benchmarks/builds.py [--recipes NAME ...] [--json FILE]

Each recipe is built on a fake world of its size. A change of the capture or of a pass that makes more nodes or launches
shows here: tests/pipeline/test_builds.py compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from result import tell
from torch.fx import GraphModule

from workbench import build, fake_world, load_recipe
from workbench.graph.read.collectives import list_collectives
from workbench.recipe.recipe import Recipe

GOLDEN = [
    "tour", "llama3_fsdp", "llama3_tp", "llama3_autobucketing", "llama3_block_bucketing_overlap_cleanup",
    "llama3_checkpointing_block_bucketing", "llama3_whole_step", "deepseek_v3_checkpointing",
]


def sizes_of(graphs: Mapping[str, GraphModule]) -> dict[str, dict[str, int]]:
    """Nodes and launches of each graph, by its name."""
    sizes = {}
    for name, graph in graphs.items():
        sizes[name] = {"nodes": len(graph.graph.nodes), "launches": len(list_collectives(graph))}
    return sizes


def sizes_of_recipe(recipe: Recipe) -> dict[str, dict[str, int]]:
    """Of the forward and the backward that it builds."""
    with fake_world(recipe.world_size) as world:
        return sizes_of(build(recipe, world).step.pair.by_part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=GOLDEN)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in options.recipes:
        rows[name] = sizes_of_recipe(load_recipe(name))
    rows["tour, 1 layer"] = sizes_of_recipe(load_recipe("tour").override({"model.n_layers": 1}))
    tell("python benchmarks/builds.py", {"recipes": rows}, options.json)


if __name__ == "__main__":
    main()
