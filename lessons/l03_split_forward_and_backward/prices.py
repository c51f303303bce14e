"""What a cut keeps and what its backward repeats."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.graph.partition import ForwardBackward
from workbench.graph.read.collectives import launches, list_collectives
from workbench.graph.read.cost import flops
from workbench.graph.read.memory import gathered_parameters_kept
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.picture import Table, table
from workbench.pipeline.run_passes import saved_bytes


def price(pair: ForwardBackward) -> dict[str, int]:
    """Bytes kept, gathered weights among them, and how many matmuls and all-gathers the backward repeats."""
    forward, backward = pair.graphs
    names = {n.name for n in forward.graph.nodes if n.op == "call_function"}
    again = [kind_of(n) for n in backward.graph.nodes if n.op == "call_function" and n.name in names]
    weights = sum(row.held_bytes for row in gathered_parameters_kept(forward, backward))
    gathers = launches(list_collectives(backward)).get(("all_gather", "dp_shard"), 0)
    return {"saved bytes": saved_bytes(pair), "of which gathered weights": weights,
            "matmuls again": again.count("matmul"), "all-gathers again": gathers}


def price_table(title: str, pairs: Mapping[str, ForwardBackward], *, flop: bool = False) -> Table:
    """The price of each cut, a row each. flop: also the step's FLOP, in percent of the first row's."""
    work = [sum(sum(flops(gm).values()) for gm in pair.graphs) for pair in pairs.values()]
    rows = []
    for (name, pair), amount in zip(pairs.items(), work, strict=True):
        share = (f"{100 * amount / work[0]:.0f} %",) if flop else ()
        rows.append((name, *price(pair).values(), *share))
    columns = ("", *price(next(iter(pairs.values()))), *(("FLOP of the step",) if flop else ()))
    return table(title, columns, rows)
