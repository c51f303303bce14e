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
from workbench.graph.read.nodes import module_path, nodes_from_line, nodes_in_module, output_values
from workbench.torch_api import tree as pytree
from workbench.torch_api.inductor import lowering
from workbench.torch_api.matcher import leaks, matches
from workbench.torch_api.ops import aliased_inputs, op_name, short_name

_OWN = ("val", "tensor_meta", "desc")  # metadata that a replacement does not inherit


def find_nodes(
    gm: GraphModule, *, op: str | Callable[..., Any] | None = None, module: str | None = None, line: str | None = None
) -> list[Node]:
    """The operator nodes of a graph that meet all given conditions, in node order.

    op: "aten.mm", "mm" or "aten.mm.default", with `*` for any text, or the operator itself. module: the path of a
    module, which includes its submodules; `*` stands for one component ("layers.*.attention"). line: "llama3.py:98",
    the end of a file's path and a line number. A backward node has the module and line of its forward node.

    Raises WorkbenchError for a line of another form.
    """
    found = [n for n in gm.graph.nodes if n.op == "call_function"]
    if op is not None:
        found = [n for n in found if _is_called(n, op)]
    if module is not None:
        paths = _modules(found, module)
        inside = {n for path in paths for n in nodes_in_module(gm, path)}
        found = [n for n in found if n in inside]
    if line is not None:
        file, _, number = line.rpartition(":")
        if not file or not number.isdigit():
            raise WorkbenchError(f"line {line!r}: expected a file and a line, such as 'llama3.py:98'")
        there = set(nodes_from_line(gm, file, int(number)))
        found = [n for n in found if n in there]
    return found


def _is_called(node: Node, op: str | Callable[..., Any]) -> bool:
    if not isinstance(op, str):
        return op in (node.target, getattr(node.target, "overloadpacket", None))
    return any(fnmatchcase(name, op) for name in (op_name(node.target), short_name(node), str(node.target)))


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
        return f"{self.count} replaced" + (f": {self.near_miss}" if self.near_miss else f", {len(self.nodes)} new")


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
    given = list(inputs) if inputs is not None else [torch.empty(4, 4) for _ in range(count)]
    if len(given) != count:
        raise WorkbenchError(f"the pattern takes {count} inputs, and {len(given)} were given")
    missed: list[tuple[int, str]] = []
    for table in (None, lowering.decomposition_table()):
        wanted, instead = (_traced(function, given, table) for function in (pattern, replacement))
        absent = _missing(gm, wanted)
        found = [] if absent else matches(wanted.graph, gm.graph)
        places = [place for match in found if len((place := _Place(wanted, instead, match.nodes_map)).tags) == 1]
        if places:
            return _replace(gm, places)
        missed.append((2, absent) if absent else _near(gm, wanted))
    return Replaced(0, near_miss=min(missed, key=lambda near: near[0])[1])


def _count(function: Callable[..., Any]) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in
        raise WorkbenchError(f"{function!r} does not say how many inputs it takes: wrap it in a lambda") from None


def _traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor], table: Any) -> GraphModule:
    name = getattr(function, "__name__", "the function")
    try:
        traced = make_fx(function, decomposition_table=table)(*inputs)
    except Exception as error:
        raise WorkbenchError(f"{name} cannot be traced: {type(error).__name__}: {error}: give `inputs` like those in "
                             "the graph") from error
    if constant := [n for n in traced.graph.nodes if n.op == "get_attr"]:
        raise WorkbenchError(f"{name} makes a tensor of its own, {constant[0].target}: make it an input")
    traced.graph.eliminate_dead_code()
    return traced


def _missing(gm: GraphModule, wanted: GraphModule) -> str:
    """Which operator of the pattern the graph lacks, or ""."""
    calls = [n for n in wanted.graph.nodes if n.op == "call_function"]
    if not calls:
        raise WorkbenchError("the pattern computes nothing: it has no operator to look for")
    if idle := [n for n in wanted.graph.find_nodes(op="placeholder") if not n.users]:
        raise WorkbenchError(f"the pattern does not use its input {idle[0].target}: leave it out")
    absent = [n for n in calls if not gm.graph.find_nodes(op="call_function", target=n.target)]
    return f"the graph has no {absent[0].target}" if absent else ""


def _near(gm: GraphModule, wanted: GraphModule) -> tuple[int, str]:
    """Why a pattern whose operators are all in the graph does not match, after a rank: 0 is the nearest miss."""
    if places := matches(wanted.graph, gm.graph, contained=False):
        inner, reader = next((leak for place in places for leak in leaks(wanted.graph, place)), (None, None))
        if inner is None:
            return 0, f"{len(places)} places lie in the forward and in the backward"
        return 0, (f"{len(places)} places but for this: {inner.name} is read outside, by {reader}; return it from the "
                   "pattern and from the replacement")
    if places := matches(wanted.graph, gm.graph, contained=False, literals=False):
        pn, gn = next((pn, gn) for pn, gn in places[0].nodes_map.items() if pn.op == "call_function"
                      and _literals(pn) != _literals(gn))
        return 0, (f"{len(places)} places but for numbers in arguments: {gn.name} has {_literals(gn)}, the pattern "
                   f"{_literals(pn)}")
    return 1, "its operators are in the graph, and nowhere joined like this"


def _literals(node: Node) -> list[Any]:
    return [leaf for leaf in pytree.tree_flatten((node.args, node.kwargs))[0]
            if not isinstance(leaf, Node)]


class _Place:
    """One match: the nodes to erase, and what replaces them."""

    def __init__(self, wanted: GraphModule, instead: GraphModule, found: dict[Node, Any]):
        self.instead = instead
        self.old = [gn for pn, gn in found.items() if pn.op == "call_function"]
        self.tags = {gn.meta.get("partitioner_tag") for gn in self.old}
        given = [found.get(n) for n in wanted.graph.find_nodes(op="placeholder")]
        self.inputs = dict(zip(instead.graph.find_nodes(op="placeholder"), given, strict=True))
        results, made = output_values(wanted), output_values(instead)
        if len(results) != len(made):
            raise WorkbenchError(f"the pattern returns {len(results)} values, and the replacement {len(made)}")
        if any(not isinstance(n, Node) or n.op == "placeholder" for n in results):
            raise WorkbenchError("the pattern returns an input, or no tensor: return what it computes")
        self.results: list[tuple[Node, Any]] = [(found[n], m) for n, m in zip(results, made, strict=True)]

    def values(self, mode: Any) -> dict[Node, Any]:
        """The fake value of each node of the replacement. Raises WorkbenchError where a result would differ."""
        known = {n: given.meta["val"] if isinstance(given, Node) else given for n, given in self.inputs.items()}
        for node in self.instead.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                try:
                    with mode or contextlib.nullcontext():
                        known[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise WorkbenchError(f"in the place of {self.old[0].name}, the replacement's {node.target} raised "
                                         f"{type(error).__name__}: {error}") from error
        for old, new in self.results:
            was, now = _like(old.meta["val"]), _like(known[new] if isinstance(new, Node) else new)
            if was != now:
                raise WorkbenchError(f"the replacement of {old.name} would give {now}, and it gives {was}")
        return known


def _like(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)} with strides {list(value.stride())} on {value.device}"


def _replace(gm: GraphModule, places: Sequence[_Place]) -> Replaced:
    values = [n.meta.get("val") for n in gm.graph.nodes]
    mode = lowering.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
    known = [place.values(mode) for place in places]
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for place in places:
        _require_inputs(place, order)
    news: list[Node] = []
    now: dict[Node, Any] = {}  # the replacements so far
    for place, vals in zip(places, known, strict=True):
        news += _put(gm, place, vals, order, now)
    for node in sorted((n for place in places for n in place.old), key=order.__getitem__, reverse=True):
        gm.graph.erase_node(node)
    _refresh_views(gm, set(news), mode)
    gm.recompile()
    return Replaced(len(places), tuple(news))


def _refresh_views(gm: GraphModule, fresh: set[Node], mode: Any) -> None:
    """Give views of a new value fake values that share its storage, as checks of memory expect."""
    for node in gm.graph.nodes:
        if node not in fresh and fresh.intersection(aliased_inputs(node)):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode or contextlib.nullcontext():
                node.meta["val"] = node.target(*args, **kwargs)
            fresh.add(node)


def _needed(place: _Place, result: Any) -> set[Node]:
    """The nodes of the replacement that one of its results depends on, with its inputs."""
    todo = [result] if isinstance(result, Node) else []
    for node in todo:
        todo += [given for given in node.all_input_nodes if given not in todo]
    return set(todo)


def _require_inputs(place: _Place, order: dict[Node, int]) -> None:
    for old, result in place.results:
        for node in _needed(place, result) & place.inputs.keys():
            given = place.inputs[node]
            if isinstance(given, Node) and order[given] > order[old]:
                raise WorkbenchError(f"the replacement of {old.name} would read {given.name}, which comes after it")


def _put(gm: GraphModule, place: _Place, vals: dict[Node, Any], order: dict[Node, int], now: dict[Node, Any]
         ) -> list[Node]:
    """Insert the replacement of each result where the old result was, so that the graph keeps its order."""
    made: dict[Node, Any] = {}
    for node, given in place.inputs.items():
        while isinstance(given, Node) and given in now:
            given = now[given]
        made[node] = given
    left = list(place.old)
    news = []
    for old, result in sorted(place.results, key=lambda pair: order[pair[0]]):
        needed = _needed(place, result)
        with gm.graph.inserting_before(old):
            for node in place.instead.graph.nodes:
                if node in needed and node not in made:
                    made[node] = new = gm.graph.node_copy(node, made.__getitem__)
                    twin = next((n for n in left if n.target == node.target), None)
                    if twin is not None:
                        left.remove(twin)
                    new.meta = {k: v for k, v in (twin or old).meta.items() if k not in _OWN}
                    if twin is None:  # else it would read as a part of the operator in whose place it stands
                        new.meta.pop("original_aten", None)
                    new.meta["val"] = vals[node]
                    news.append(new)
        now[old] = made[result]
        old.replace_all_uses_with(made[result])
    return news
