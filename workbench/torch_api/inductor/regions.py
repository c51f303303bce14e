"""Named regions of a model: annotated during tracing, cut out of a graph, and compiled separately.

Source: torch/fx/traceback.py (`annotate`), torch/fx/passes/utils/fuser_utils.py,
torch/_inductor/__init__.py (`standalone_compile`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import networkx as nx
import torch
import torch.fx.traceback
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from workbench.errors import WorkbenchError
from workbench.torch_api.aot import accepted
from workbench.torch_api.inductor import kernels
from workbench.torch_api.ops import aliased_inputs

_KEY = "region"
_PREFIX = "region_part_"


def region(name: str) -> AbstractContextManager[None]:
    """Name the operators inside `with region(name):` in a module's forward, and those of their backward.

    A name costs nothing and changes nothing by itself; passes such as regional_inductor use it. An inner name wins.
    """
    return torch.fx.traceback.annotate({_KEY: name})


def region_of(node: Node) -> str | None:
    """The name of the node's region, or None."""
    return (node.meta.get("custom") or {}).get(_KEY)


def named_regions(graph: GraphModule, untagged: str = "forward") -> dict[str, set[str]]:
    """The regions of a graph's nodes, without views, by direction: forward or backward.

    untagged: the direction of nodes without a tag.
    """
    names: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for node in graph.graph.nodes:
        if (name := region_of(node)) and not aliased_inputs(node):
            tag = node.meta.get("partitioner_tag") or untagged
            names["backward" if "backward" in tag else "forward"].add(name)
    return names


def check_options(config: Mapping[str, Any], where: str) -> None:
    """Raise WorkbenchError for a key that is not an option of Inductor, with the nearest option.

    Also for a text as the value of a boolean option, since every text counts as true.
    """
    import torch._inductor.config

    known = torch._inductor.config.get_config_copy()
    for key, value in config.items():
        if key not in known:
            hint = _nearest(key, known, "see torch/_inductor/config.py")
            raise WorkbenchError(f"{where}: Inductor has no option {key!r}: {hint}")
        if isinstance(known[key], bool) and isinstance(value, str):
            raise WorkbenchError(
                f"{where}: Inductor's option {key!r} is true or false, and not {value!r}"
            )


def check_operators(names: Iterable[str], where: str) -> None:
    """Raise WorkbenchError for a name that no operator of torch has, with the nearest."""
    operators = torch._C._dispatch_get_all_op_names()
    known = {operator.partition("::")[2].partition(".")[0] for operator in operators}
    for name in set(names) - known:
        hint = _nearest(
            name, known, "give names without namespace and overload, such as silu_backward"
        )
        raise WorkbenchError(f"{where}: no operator {name!r}: {hint}")


def _nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def parts_of(graph: GraphModule, groups: Mapping[Node, str]) -> list[tuple[str, list[Node]]]:
    """Split groups into parts that can each become one call: (group, nodes), in node order. groups: by node.

    A node's level is the largest number of times that a path to it enters a group. Leaving a part and entering another
    raises the level, so that parts of one group and one level form no cycle.
    """
    level: dict[Node, int] = {}
    parts: dict[tuple[str, int], list[Node]] = {}
    for node in graph.graph.nodes:
        mine, at = groups.get(node), -1
        for operand in node.all_input_nodes:
            entered = mine is not None and level[operand] >= 0 and groups.get(operand) != mine
            at = max(at, level[operand] + entered)
        level[node] = at if mine is None else max(at, 0)
        if mine is not None:
            parts.setdefault((mine, level[node]), []).append(node)
    return [(name, nodes) for (name, _), nodes in parts.items()]


def _with_modules(graph: GraphModule, nodes: Sequence[Node]) -> list[Node]:
    """`nodes`, each after its own copies of the graphs that it takes, such as attention's score function."""
    out = []
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and isinstance(
                getattr(graph, str(operand.target), None), GraphModule
            ):
                with graph.graph.inserting_before(node):
                    copy = graph.graph.node_copy(operand)
                node.replace_input_with(operand, copy)
                out.append(copy)
        out.append(node)
    return out


def cut_out(
    graph: GraphModule, parts: Sequence[tuple[str, list[Node]]], at: Sequence[Node]
) -> list[tuple[str, Node]]:
    """Replace each part by a call of a submodule: (group, call), in the order of the parts.

    A call takes the place of its node of `at`, or the next one where its inputs are there. The nodes outside keep their
    order, which torch changes, if they do not wait for a call.
    """
    place = {node.name: i for i, node in enumerate(graph.graph.nodes)}
    wanted = [place[node.name] for node in at]
    with torch.fx.traceback.preserve_node_meta(enable=False):
        whole = [dict.fromkeys(_with_modules(graph, nodes)) for _, nodes in parts]
        for node in graph.graph.find_nodes(op="get_attr"):
            if not node.users:
                graph.graph.erase_node(node)
        fuse_by_partitions(graph, whole, _PREFIX, always_return_tuple=True)
        graph.delete_all_unused_submodules()
    calls = {str(node.target): node for node in graph.graph.find_nodes(op="call_module")}
    named_calls = [(name, calls[f"{_PREFIX}{i}"]) for i, (name, _) in enumerate(parts)]
    place |= {call.name: at for (_, call), at in zip(named_calls, wanted, strict=True)}
    output, needs = graph.graph.output_node(), nx.DiGraph()
    needs.add_nodes_from(graph.graph.nodes)
    needs.add_edges_from(
        (operand, node) for node in graph.graph.nodes for operand in node.all_input_nodes
    )
    for node in nx.lexicographical_topological_sort(
        needs, lambda n: (place.get(n.name, -1), n.name)
    ):
        if node is not output:
            output.prepend(node)
    return named_calls


def compile_call(graph: GraphModule, call: Node, name: str, config: dict[str, Any]) -> Node:
    """Compile the submodule that `call` calls, and replace the call by one of the compiled function, called `name`."""
    import torch._inductor.config

    target = str(call.target)
    keywords = accepted(torch._inductor.standalone_compile, {
        "dynamic_shapes": "from_tracing_context", "aot": True, "donate_graph_module": True})
    inputs = [n.meta["val"] for n in call.all_input_nodes]
    config = {"fallback_random": True, **config}  # or it would draw other numbers than eager
    with (torch.fx.traceback.preserve_node_meta(enable=False), torch._inductor.config.patch(config),
          kernels.collected() as results):
        inner = cast(GraphModule, graph.get_submodule(target))
        compiled = torch._inductor.standalone_compile(inner, inputs, **keywords)
    with graph.graph.inserting_after(call):
        compiled_call = graph.graph.call_function(
            _function(name, compiled, results), call.args, call.kwargs
        )
    compiled_call.meta = dict(call.meta)
    call.replace_all_uses_with(compiled_call)
    graph.graph.erase_node(call)
    graph.delete_submodule(target)
    return compiled_call


def _function(name: str, compiled: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    """A function around the compiled artifact, with the name that FX writes into code."""

    def run(*args: Any) -> Any:
        return compiled(*args)

    run.__name__ = run.__qualname__ = name
    run.__module__ = "regions"
    run.made_by_inductor = results  # type: ignore[attr-defined]
    return run


def inductor_results(function: Any) -> list[Any] | None:
    """What Inductor made of the region that this function runs, or None for another function.

    One result of Inductor is all that runs: AOTAutograd around it passes on tensors that need no gradient.
    """
    return getattr(function, "made_by_inductor", None)


def seen_of(call: Node) -> list[kernels.Seen]:
    """The records of the compilation of the region that `call` calls."""
    records = [kernels.seen(result) for result in inductor_results(call.target) or ()]
    return [record for record in records if record is not None]
