"""Inductor's table of decompositions is applied to a captured graph, or to the capture itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.passes.effect import Effect
from workbench.passes.inductor_decomposition import CONTRACT, DecompositionOptions
from workbench.passes.inductor_decomposition.decomposer import Decomposer
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.torch_api.inductor import lowering
from workbench.torch_api.ops import draws


def fewer_composite_operators(before: Graphs, after: Graphs, options: DecompositionOptions) -> Effect:
    """Operators that the table replaces are gone; at the capture: it left none of them."""
    table = lowering.decomposition_table()

    def listed(graphs: Graphs) -> Counter[str]:
        return Counter(str(n.target) for g in graphs for n in g.graph.nodes if n.target in table)

    was, now = listed(before), listed(after)
    gone = was - now
    if options.at_capture:
        left = dict(gone.most_common())
        reason = f"the graph was captured without the table, and this pass replaced {left}" if left else ""
        return Effect(not left, reason, {"at": "capture", "left": left})
    evidence = {"replaced": dict(gone.most_common()), "left": dict(now)}
    return Effect(bool(gone), "" if gone else "no operator of the graph is in Inductor's table", evidence)


def inductor_decomposition(
    gm: GraphModule, example_inputs: list[Any], *, options: DecompositionOptions
) -> GraphModule:
    """Replace every operator in Inductor's table by its body; at="capture" that has been done, and is checked.

    Raises WorkbenchError where the table replaces an operator that draws random numbers, naming the node: its body
    would draw others. After a capture with the table, that is any such operator.
    """
    table = lowering.decomposition_table()
    for node in gm.graph.nodes:
        listed = node.target in table or options.at_capture
        if node.op == "call_function" and listed and draws(node):
            raise WorkbenchError(
                f"inductor_decomposition: node {node.name!r} ({node.target}) draws random numbers, and its replacement"
                " would draw others: remove it from the model, or remove the pass"
            )
    return Decomposer(gm, table).run()


PASS = RegisteredPass(CONTRACT, inductor_decomposition, fewer_composite_operators)
