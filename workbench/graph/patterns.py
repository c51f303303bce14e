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
from workbench.graph.read.nodes import module_path, nodes_from_line, output_values, placed
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
        parts = module.split(".")
        nodes = [n for n in nodes if _is_inside(n, parts)]
    if line is not None:
        file, _, number = line.rpartition(":")
        if not file or not number.isdigit():
            raise WorkbenchError(
                f"line {line!r}: expected a file and a line, such as 'llama3.py:98'"
            )
        there = nodes_from_line(gm, file, int(number))
        nodes = [n for n in nodes if n in there]
    return nodes


def _is_called(node: Node, op: str | Callable[..., Any]) -> bool:
    if not isinstance(op, str):
        return op in (node.target, getattr(node.target, "overloadpacket", None))
    return any(
        fnmatchcase(name, op) for name in (op_name(node.target), short_name(node), str(node.target))
    )


def _is_inside(node: Node, module: list[str]) -> bool:
    path = module_path(node).split(".")
    return len(path) >= len(module) and all(map(fnmatchcase, path, module))


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
        more = f": {self.near_miss}" if self.near_miss else f", {len(self.nodes)} new"
        return f"{self.count} replaced{more}"


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
    stand where the first result was, or behind their inputs. They get new fake values. All other metadata (stack trace,
    module, direction, tags, annotations) comes from the matched node with the same operator, or from the first result,
    without `original_aten`.

    Raises WorkbenchError, before any replacement, if a pattern cannot be traced, or if the results would differ in
    number, shape, strides, dtype or device; and where a result would need what is computed behind its reader.
    """
    count, other = (len(inspect.signature(function).parameters) for function in (pattern, replacement))
    if count != other:
        raise WorkbenchError(f"the pattern takes {count} inputs, and the replacement {other}")
    examples = [torch.empty(4, 4) for _ in range(count)] if inputs is None else list(inputs)
    if len(examples) != count:
        raise WorkbenchError(f"the pattern takes {count} inputs, and {len(examples)} were given")
    misses = []
    for table in (None, lowering.decomposition_table()):
        wanted, instead = (_traced(function, examples, table) for function in (pattern, replacement))
        miss = _near_miss(gm, wanted)
        if not miss:
            places = [match.nodes_map for match in matches(wanted.graph, gm.graph) if _one_sided(match)]
            return _replace(gm, wanted, instead, places)
        misses.append(miss)
    return Replaced(0, near_miss=min(misses, key=lambda miss: miss.startswith(_ABSENT)))


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
    tags = {node.meta.get("partitioner_tag") for node in _matched(match.nodes_map)}
    return len(tags) == 1


def _matched(place: dict[Node, Any]) -> list[Node]:
    """The nodes of a match that its replacement takes the place of; `place`: by node of the pattern."""
    return [node for wanted, node in place.items() if wanted.op == "call_function"]


_ABSENT = "the graph has no "


def _near_miss(gm: GraphModule, wanted: GraphModule) -> str:
    """Why the pattern does not match; "" where it matches."""
    operators = [n for n in wanted.graph.nodes if n.op == "call_function"]
    if not operators:
        raise WorkbenchError("the pattern computes nothing: it has no operator to look for")
    if idle := [n for n in wanted.graph.find_nodes(op="placeholder") if not n.users]:
        raise WorkbenchError(f"the pattern does not use its input {idle[0].target}: leave it out")
    for node in operators:
        if not gm.graph.find_nodes(op="call_function", target=node.target):
            return f"{_ABSENT}{node.target}"
    if places := matches(wanted.graph, gm.graph):
        return "" if any(map(_one_sided, places)) else f"{len(places)} places lie in the forward and in the backward"
    if places := matches(wanted.graph, gm.graph, contained=False):
        inner, reader = next(leak for place in places for leak in leaks(wanted.graph, place))
        return (f"{len(places)} places but for this: {inner.name} is read outside, by {reader}; return it from the "
                "pattern and from the replacement")
    return "its operators are in the graph, and nowhere joined like this, or with other numbers in arguments"


def _replace(
    gm: GraphModule, wanted: GraphModule, instead: GraphModule, places: Sequence[dict[Node, Any]]
) -> Replaced:
    """Replace each place, which has the graph's node for each node of `wanted`, by the nodes of `instead`."""
    old, new = output_values(wanted), output_values(instead)
    if len(old) != len(new):
        raise WorkbenchError(f"the pattern returns {len(old)} values, and the replacement {len(new)}")
    if any(not isinstance(n, Node) or n.op == "placeholder" for n in old):
        raise WorkbenchError("the pattern returns an input, or no tensor: return what it computes")
    results = dict(zip(old, new, strict=True))
    inputs = dict(zip(*(g.graph.find_nodes(op="placeholder") for g in (instead, wanted)), strict=True))
    mode = fake_mode_of(gm)
    values = [_values(instead, {n: place[m] for n, m in inputs.items()}, mode) for place in places]
    for place, value in zip(places, values, strict=True):
        for result, by in results.items():
            was, now = _like(place[result].meta["val"]), _like(value.get(by, by))
            if was != now:
                raise WorkbenchError(f"the replacement of {place[result]} would give {now}, and it gives {was}")
    added: list[Node] = []
    replaced: dict[Node, Any] = {}
    for place, value in zip(places, values, strict=True):
        copies: dict[Node, Any] = {n: replaced.get(place[m], place[m]) for n, m in inputs.items()}
        added += _put(gm, instead, _matched(place), min(place[n] for n in results), copies, value)
        for result, by in results.items():
            before, after = place[result], copies.get(by, by)
            if isinstance(after, Node) and (early := [user for user in before.users if user < after]):
                raise WorkbenchError(f"the replacement of {before} would stand behind {early[0]}, which reads it")
            before.replace_all_uses_with(after)
            replaced |= {n: after for n in (before, *(k for k, v in replaced.items() if v is before))}
    for node in sorted((n for place in places for n in _matched(place)), reverse=True):
        gm.graph.erase_node(node)
    refresh_views(gm, set(added))
    gm.recompile()
    return Replaced(len(places), tuple(added))


def _values(instead: GraphModule, inputs: dict[Node, Any], mode: Any) -> dict[Node, Any]:
    """The fake value of each node of the replacement."""
    values = {n: source.meta["val"] if isinstance(source, Node) else source for n, source in inputs.items()}
    for node in (n for n in instead.graph.nodes if n.op == "call_function"):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        try:
            with mode or contextlib.nullcontext():
                values[node] = node.target(*args, **kwargs)
        except Exception as error:
            raise WorkbenchError(
                f"the replacement's {node.target} raised {type(error).__name__}: {error}"
            ) from error
    return values


def _like(value: Any) -> str:
    strides = f" with strides {list(value.stride())}" if isinstance(value, torch.Tensor) else ""
    return placed(value) + strides


def _put(
    gm: GraphModule, instead: GraphModule, matched: list[Node], first: Node, copies: dict[Node, Any],
    values: dict[Node, Any],
) -> list[Node]:
    """Insert the replacement where its first result is, or behind its inputs. `copies` has these, and grows."""
    added, twins = [], list(matched)
    for node in (n for n in instead.graph.nodes if n.op == "call_function"):
        sources = [copies[n] for n in node.all_input_nodes if isinstance(copies[n], Node)]
        late = max([first, *sources])
        with gm.graph.inserting_before(first) if late is first else gm.graph.inserting_after(late):
            copies[node] = copy = gm.graph.node_copy(node, copies.__getitem__)
        twin = next((n for n in twins if n.target == node.target), None)
        copy.meta = origin_of(twin or first) | {"val": values[node]}
        if twin is not None:
            twins.remove(twin)
        else:  # it would read as a part of the operator in whose place it stands
            copy.meta.pop("original_aten", None)
        added.append(copy)
    return added
