"""regional_inductor: Inductor compiles the named regions of the model; the rest of the graph stays as it is.

In this model each layer is in `with region("layer"):`, and its part of the graph becomes one call:

    >>> example("regional_inductor", lambda x, weight: (x @ weight).sigmoid())
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
    after:
      ...
      region_layer_layers_0: float32 [4, 4], ... = regions.region_layer_layers_0(primals_2, primals_1)
      getitem: float32 [4, 4] = operator.getitem(region_layer_layers_0, 0)  # layers.0
      ...
      sum_1: float32 [] = aten.sum(getitem)
      ...
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.read.cost import node_flops
from workbench.graph.read.memory import parameter_moves
from workbench.graph.read.nodes import is_compute, kind_of, module_path
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.inductor import regions
from workbench.torch_api.ops import COMPILED_REGION, is_symbolic, short_name


class RegionalOptions(Options):
    """regions: names of regions, by default all. config: Inductor's options. fallback: operators that stay outside."""

    regions: tuple[str, ...] = ()
    config: dict[str, bool | int | float | str] = Field({})
    fallback: tuple[str, ...] = ()


_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_KEPT_OUT = "collectives, gather chains, fallback, sizes read in a step"
_COMPUTES = frozenset({"matmul", "attention", "pointwise", "reduction", "random", "index", "other"})


def _names(graph: GraphModule) -> set[str]:
    return {name for n in graph.graph.nodes if (name := regions.region_of(n))}


def compiled_regions(before: Graphs, after: Graphs, options: RegionalOptions) -> Effect:
    """At least one region is compiled, and each that the options name. The partition lost none.

    The partition loses a region of which one direction has no node left: torch's CSE keeps the first of equal nodes.
    """
    calls = [[n for n in graph.graph.nodes if COMPILED_REGION in n.meta] for graph in after]
    inside = sum(n.meta[COMPILED_REGION]["nodes"] for graph in calls for n in graph)
    kept = [
        regions.named_regions(graph, which)
        for graph, which in zip(before, ("forward", "backward"), strict=True)
    ]
    captured = facts_of(before[0]).step.captured_regions
    gone = [(name, which) for which, were in captured.items() for name in options.regions or were
            if name in were and not any(name in names[which] for names in kept)]
    evidence = {
        "regions": [len(nodes) for nodes in calls],
        "nodes_inside": inside,
        "names": sorted({n.meta[COMPILED_REGION]["name"] for graph in calls for n in graph}),
        "lost": [f"{name} in the {which}" for name, which in gone],
    }
    if gone:
        name, which = gone[0]
        return Effect(False, f"the partition left no node of region {name!r} in the {which}: "
                             "of equal nodes it keeps one, and its name", evidence)
    if left := [name for name in options.regions if name not in evidence["names"]]:
        return Effect(False, f"nothing of region {left[0]!r} was compiled ({_KEPT_OUT})", evidence)
    if inside:
        return Effect(True, "", evidence)
    reason = 'no node is in a named region: write `with region("name"):` in the model'
    if any(map(_names, before)):
        reason = f"every node of the regions was kept out ({_KEPT_OUT})"
    return Effect(False, reason, evidence)


def _compilable(node: Node, chosen: Mapping[Node, str]) -> bool:
    """Whether a node computes a tensor, or a tuple of which only items are read, or is such an item."""
    kind, value = kind_of(node), node.meta.get("val")
    # a compiled part has no input for a size that is known only when the step runs
    if any(is_symbolic(n.meta.get("val")) for n in (node, *node.all_input_nodes)):
        return False
    if node.target is operator.getitem:
        return node.args[0] in chosen
    if isinstance(value, tuple):
        return kind != "collective" and all(user.target is operator.getitem for user in node.users)
    return kind not in ("collective", "wait", "bookkeeping") and isinstance(value, torch.Tensor)


def members(graph: GraphModule, names: Iterable[str], fallback: Iterable[str]) -> dict[Node, str]:
    """The nodes to compile, each with its region and block; collectives and gather chains never enter a region."""
    wanted, left = set(names), set(fallback)
    kept = parameter_moves(graph)
    chosen: dict[Node, str] = {}
    for node in graph.graph.nodes:
        name = regions.region_of(node)
        if name is None or name not in wanted or node in kept or short_name(node) in left:
            continue
        if node.op == "call_function" and _compilable(node, chosen):
            block = _BLOCK.match(module_path(node))
            chosen[node] = f"{name}_{block[1]}" if block else name
    return chosen


def parts_to_compile(graph: GraphModule, names: Iterable[str] = (), fallback: Iterable[str] = ()
                     ) -> list[tuple[str, list[Node]]]:
    """The parts that the pass compiles, in node order: (region and block, nodes). Compiles nothing itself.

    names: of regions, by default all; fallback: operators to leave out. Nodes of one region and block are one part,
    unless something outside lies between them.
    """
    parts = regions.parts_of(graph, members(graph, set(names) or _names(graph), fallback))
    # a part of views and copies alone has nothing to compile
    return [(name, nodes) for name, nodes in parts if any(kind_of(n) in _COMPUTES for n in nodes)]


@register_pass(
    "regional_inductor", stage="partitioned", numerics="lossy", tolerance=5e-6,
    changes="each named region of the model is one call of a compiled function", options=RegionalOptions,
    conflicts={"full_inductor_compilation"},
    after={"autobucketing_reordering", "transformer_block_bucketing", "overlap_collectives", "graph_cleanup"},
    needs={"compiler"}, effect=compiled_regions,
    source="torch._inductor.standalone_compile, as torch.fx.passes.regional_inductor does",
)
def regional_inductor(gm: GraphModule, example_inputs: list[Any], *, options: RegionalOptions) -> GraphModule:
    """Compile each named region of each block on its own; the rest of the graph calls it like an operator.

    Raises WorkbenchError, before anything is compiled, where a region of the options is not in the model, or torch does
    not know one of their operators or of Inductor's options.
    """
    step = facts_of(gm).step
    named = _names(gm).union(step.regions, *step.captured_regions.values())
    step.regions = tuple(sorted(named))  # the backward may have lost one: it still counts as known
    if unknown := [name for name in options.regions if name not in named]:
        known = ", ".join(map(repr, step.regions)) or "none"
        raise WorkbenchError(
            f"pass 'regional_inductor': no region {unknown[0]!r} in the model: it has {known}"
        )
    regions.check_operators(options.fallback, "pass 'regional_inductor': fallback")
    regions.check_options(options.config, "pass 'regional_inductor'")
    parts = parts_to_compile(gm, options.regions or named, options.fallback)
    facts = [{"name": regions.region_of(nodes[0]), "nodes": len(nodes), "flop": sum(map(node_flops, nodes)),
              "products": sum(map(is_compute, nodes))} for _, nodes in parts]
    # what collectives hide behind
    products = [next(filter(is_compute, nodes), nodes[-1]) for _, nodes in parts]
    for (block, call), fact in zip(regions.cut_out(gm, parts, products), facts, strict=True):
        compiled = regions.compile_call(
            gm, call, re.sub(r"\W", "_", f"region_{block}"), options.config
        )
        compiled.meta[COMPILED_REGION] = fact
    return gm
