"""Find nodes by operator, module or line, and replace one subgraph by another with its metadata kept."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.errors import WorkbenchError
from workbench.graph.make_nodes import fake_mode_of, origin_of, refresh_views
from workbench.graph.read.nodes import module_path, nodes_from_line, nodes_in_module, output_values
from workbench.torch_api import tree as pytree
from workbench.torch_api.inductor import lowering
from workbench.torch_api.matcher import leaks, matches
from workbench.torch_api.ops import op_name, short_name


def find_nodes(
    gm: GraphModule,
    *,
    op: str | Callable[..., Any] | None = None,
    module: str | None = None,
    line: str | None = None,
) -> list[Node]:
    """The operator nodes of a graph that meet all given conditions, in node order.

    op: "aten.mm", "mm" or "aten.mm.default", with `*` for any text, or the operator itself. module: the path of a
    module, which includes its submodules; `*` stands for one component ("layers.*.attention"). line: "llama3.py:98",
    the end of a file's path and a line number. A backward node has the module and line of its forward node.

    Raises WorkbenchError for a line of another form.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    if op is not None:
        nodes = [n for n in nodes if _is_called(n, op)]
    if module is not None:
        inside = {n for path in _modules(nodes, module) for n in nodes_in_module(gm, path)}
        nodes = [n for n in nodes if n in inside]
    if line is not None:
        file, _, number = line.rpartition(":")
        if not file or not number.isdigit():
            raise WorkbenchError(
                f"line {line!r}: expected a file and a line, such as 'llama3.py:98'"
            )
        there = set(nodes_from_line(gm, file, int(number)))
        nodes = [n for n in nodes if n in there]
    return nodes


def _is_called(node: Node, op: str | Callable[..., Any]) -> bool:
    if not isinstance(op, str):
        return op in (node.target, getattr(node.target, "overloadpacket", None))
    return any(
        fnmatchcase(name, op) for name in (op_name(node.target), short_name(node), str(node.target))
    )


def _modules(nodes: Sequence[Node], pattern: str) -> list[str]:
    """The module paths that match a pattern, among the modules of the nodes and the modules around these."""
    if "*" not in pattern:
        return [pattern]
    depth = pattern.count(".") + 1
    heads = dict.fromkeys(".".join(module_path(n).split(".")[:depth]) for n in nodes)
    return [path for path in heads if path.count(".") + 1 == depth and all(
        map(fnmatchcase, path.split("."), pattern.split(".")))]


@dataclass(frozen=True)
class Replaced:
    """The result of `replace_pattern`.

    count: number of replacements. nodes: the new nodes. near_miss: without a match, the closest one and what differs.
    """

    count: int
    nodes: tuple[Node, ...] = ()
    near_miss: str = ""

    def __bool__(self) -> bool:
        return self.count > 0

    def __repr__(self) -> str:
        return f"{self.count} replaced" + (
            f": {self.near_miss}" if self.near_miss else f", {len(self.nodes)} new"
        )


def replace_pattern(
    gm: GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    inputs: Sequence[torch.Tensor] | None = None,
) -> Replaced:
    """Replace every match of `pattern` in `gm` by `replacement`. Edits `gm`, as a pass does with its copy.

    Both are functions with equal numbers of tensor inputs and of results, traced to aten operators with `inputs`:
    tensors with the dtypes and numbers of dimensions of the graph's, which may be fake, such as a node's `meta["val"]`.
    The default is float32 matrices. If the pattern does not match, both are decomposed as Inductor does, and tried
    again.

    Numbers and sizes in the arguments must be equal. Two inputs stand for two different nodes. A match lies in the
    forward or in the backward as a whole. The pattern must return every value that is read outside the match. New nodes
    get new fake values. All other metadata (stack trace, module, direction, tags, annotations) comes from the matched
    node with the same operator, or from the node whose value they compute, without `original_aten`.

    Raises WorkbenchError, before any replacement, if a pattern cannot be traced, or if the results would differ in
    number, shape, strides, dtype or device.
    """
    count, other = _count(pattern), _count(replacement)
    if count != other:
        raise WorkbenchError(f"the pattern takes {count} inputs, and the replacement {other}")
    examples = [torch.empty(4, 4) for _ in range(count)] if inputs is None else list(inputs)
    if len(examples) != count:
        raise WorkbenchError(f"the pattern takes {count} inputs, and {len(examples)} were given")
    misses = []
    for table in (None, lowering.decomposition_table()):
        wanted, instead = (
            _traced(function, examples, table) for function in (pattern, replacement)
        )
        rank, miss = _near_miss(gm, wanted)
        if not miss:
            matched = matches(wanted.graph, gm.graph)
            return _replace(gm, [_Place(wanted, instead, match.nodes_map) for match in matched if _one_sided(match)])
        misses.append((rank, miss))
    return Replaced(0, near_miss=min(misses, key=lambda miss: miss[0])[1])


def _count(function: Callable[..., Any]) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in
        raise WorkbenchError(
            f"{function!r} does not say how many inputs it takes: wrap it in a lambda"
        ) from None


def _traced(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], table: Any
) -> GraphModule:
    name = getattr(function, "__name__", "the function")
    try:
        traced = make_fx(function, decomposition_table=table)(*inputs)
    except Exception as error:
        raise WorkbenchError(
            f"{name} cannot be traced: {type(error).__name__}: {error}: give `inputs` like those in "
            "the graph"
        ) from error
    if constant := [n for n in traced.graph.nodes if n.op == "get_attr"]:
        raise WorkbenchError(
            f"{name} makes a tensor of its own, {constant[0].target}: make it an input"
        )
    traced.graph.eliminate_dead_code()
    return traced


def _one_sided(match: Any) -> bool:
    """Whether a match lies in the forward or in the backward as a whole."""
    tags = {
        node.meta.get("partitioner_tag")
        for pn, node in match.nodes_map.items()
        if pn.op == "call_function"
    }
    return len(tags) == 1


def _near_miss(gm: GraphModule, wanted: GraphModule) -> tuple[int, str]:
    """(rank, why the pattern does not match): 0 is the nearest miss; "" where it matches."""
    operators = [n for n in wanted.graph.nodes if n.op == "call_function"]
    if not operators:
        raise WorkbenchError("the pattern computes nothing: it has no operator to look for")
    if idle := [n for n in wanted.graph.find_nodes(op="placeholder") if not n.users]:
        raise WorkbenchError(f"the pattern does not use its input {idle[0].target}: leave it out")
    for node in operators:
        if not gm.graph.find_nodes(op="call_function", target=node.target):
            return 2, f"the graph has no {node.target}"
    if places := matches(wanted.graph, gm.graph):
        return 0, "" if any(
            map(_one_sided, places)
        ) else f"{len(places)} places lie in the forward and in the backward"
    if places := matches(wanted.graph, gm.graph, contained=False):
        inner, reader = next(leak for place in places for leak in leaks(wanted.graph, place))
        return 0, (
            f"{len(places)} places but for this: {inner.name} is read outside, by {reader}; return it from the "
            "pattern and from the replacement"
        )
    if places := matches(wanted.graph, gm.graph, contained=False, literals=False):
        pairs = [(pn, gn) for pn, gn in places[0].nodes_map.items() if pn.op == "call_function"]
        pn, gn = next(pair for pair in pairs if _literals(pair[0]) != _literals(pair[1]))
        return 0, (
            f"{len(places)} places but for numbers in arguments: {gn.name} has {_literals(gn)}, the pattern "
            f"{_literals(pn)}"
        )
    return 1, "its operators are in the graph, and nowhere joined like this"


def _literals(node: Node) -> list[Any]:
    return [leaf for leaf in pytree.tree_flatten((node.args, node.kwargs))[0]
            if not isinstance(leaf, Node)]


class _Place:
    """One match: the nodes to erase, and what replaces them."""

    def __init__(self, wanted: GraphModule, instead: GraphModule, nodes: dict[Node, Any]):
        self.instead = instead
        self.old = [gn for pn, gn in nodes.items() if pn.op == "call_function"]
        sources = [nodes.get(n) for n in wanted.graph.find_nodes(op="placeholder")]
        self.inputs = dict(zip(instead.graph.find_nodes(op="placeholder"), sources, strict=True))
        old, new = output_values(wanted), output_values(instead)
        if len(old) != len(new):
            raise WorkbenchError(
                f"the pattern returns {len(old)} values, and the replacement {len(new)}"
            )
        if any(not isinstance(n, Node) or n.op == "placeholder" for n in old):
            raise WorkbenchError(
                "the pattern returns an input, or no tensor: return what it computes"
            )
        self.results: list[tuple[Node, Any]] = [
            (nodes[n], m) for n, m in zip(old, new, strict=True)
        ]

    def values(self, mode: Any) -> dict[Node, Any]:
        """The fake value of each node of the replacement. Raises WorkbenchError where a result would differ."""
        known = {
            n: value.meta["val"] if isinstance(value, Node) else value
            for n, value in self.inputs.items()
        }
        for node in self.instead.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                try:
                    with mode or contextlib.nullcontext():
                        known[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise WorkbenchError(
                        f"in the place of {self.old[0].name}, the replacement's {node.target} raised "
                        f"{type(error).__name__}: {error}"
                    ) from error
        for old, new in self.results:
            was, now = _like(old.meta["val"]), _like(known[new] if isinstance(new, Node) else new)
            if was != now:
                raise WorkbenchError(
                    f"the replacement of {old.name} would give {now}, and it gives {was}"
                )
        return known

    def needed(self, result: Any) -> set[Node]:
        """The nodes of the replacement that one of its results depends on, with its inputs."""
        nodes = [result] if isinstance(result, Node) else []
        for node in nodes:
            nodes += [n for n in node.all_input_nodes if n not in nodes]
        return set(nodes)

    def require_inputs(self, order: dict[Node, int]) -> None:
        """Raises WorkbenchError where a result would be computed before what it reads."""
        for old, result in self.results:
            for node in self.needed(result) & self.inputs.keys():
                source = self.inputs[node]
                if isinstance(source, Node) and order[source] > order[old]:
                    raise WorkbenchError(
                        f"the replacement of {old.name} would read {source.name}, which comes after "
                        "it"
                    )


def _like(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)} with strides {list(value.stride())} on {value.device}"


def _replace(gm: GraphModule, places: Sequence[_Place]) -> Replaced:
    mode = fake_mode_of(gm)
    known = [place.values(mode) for place in places]
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for place in places:
        place.require_inputs(order)
    added: list[Node] = []
    replaced: dict[Node, Any] = {}
    for place, values in zip(places, known, strict=True):
        added += _put(gm, place, values, order, replaced)
    for node in sorted(
        (n for place in places for n in place.old), key=order.__getitem__, reverse=True
    ):
        gm.graph.erase_node(node)
    refresh_views(gm, set(added))
    gm.recompile()
    return Replaced(len(places), tuple(added))


def _put(
    gm: GraphModule,
    place: _Place,
    values: dict[Node, Any],
    order: dict[Node, int],
    replaced: dict[Node, Any],
) -> list[Node]:
    """Insert the replacement of each result where the old result was, so that the graph keeps its order.

    replaced: what stands for results of this and of earlier places; it grows.
    """
    copies: dict[Node, Any] = {}
    for node, source in place.inputs.items():
        while isinstance(source, Node) and source in replaced:
            source = replaced[source]
        copies[node] = source
    left, added = list(place.old), []
    for old, result in sorted(place.results, key=lambda pair: order[pair[0]]):
        needed = place.needed(result)
        missing = [
            node for node in place.instead.graph.nodes if node in needed and node not in copies
        ]
        with gm.graph.inserting_before(old):
            for node in missing:
                copies[node] = copy = gm.graph.node_copy(node, copies.__getitem__)
                twin = next((n for n in left if n.target == node.target), None)
                copy.meta = origin_of(twin or old) | {"val": values[node]}
                # else it would read as a part of the operator in whose place it stands
                if twin is None:
                    copy.meta.pop("original_aten", None)
                else:
                    left.remove(twin)
                added.append(copy)
        replaced[old] = copies[result]
        old.replace_all_uses_with(copies[result])
    return added
