"""What mutation operators share: their table, places in a graph where one applies, and edits that keep metadata."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from on_ranks import calls, computed, reread
from torch.fx import GraphModule, Node

from workbench.graph.read.collectives import waits_of
from workbench.torch_api.distributed.fake import without_log
from workbench.torch_api.ops import OPERATORS as TORCH_OPERATORS
from workbench.torch_api.ops import collective_kind, is_random, is_wait, writes

ATEN = torch.ops.aten
Sites = Callable[[GraphModule], Iterable[Any]]


@dataclass(frozen=True)
class Mutation:
    """One mutation operator: `edit(graph, rng)` changes the graph in place and returns the nodes that it touched.

    None where the graph has no place for it. kind: the family that the table of results groups by. about: one line.
    """

    name: str
    kind: str
    about: str
    edit: Callable[[GraphModule, Random], Sequence[Node | str] | None]


OPERATORS: dict[str, Mutation] = {}


def enter(kind: str, name: str, about: str, edit: Any, sites: Sites | None = None) -> None:
    """Put one operator into the table. With `sites`, `edit(gm, rng, site)` is given one of them."""
    def anywhere(gm: GraphModule, rng: Random) -> Any:
        return first(rng, sites(gm), lambda site: edit(gm, rng, site)) if sites else edit(gm, rng)

    assert name not in OPERATORS and about, name
    OPERATORS[name] = Mutation(name, kind, about, anywhere)


def mutation(kind: str, sites: Sites | None = None) -> Callable[[Any], Any]:
    """Enter a function under its own name, with the first line of its docstring."""
    def decorate(edit: Any) -> Any:
        enter(kind, edit.__name__, edit.__doc__.splitlines()[0], edit, sites)
        return edit

    return decorate


def first(rng: Random, sites: Iterable[Any], use: Callable[[Any], Any]) -> Any:
    """`use(site)` for the sites in random order, until one of them gives a result."""
    shuffled = list(sites)
    rng.shuffle(shuffled)
    return next((found for site in shuffled if (found := use(site)) is not None), None)


def one_of(options: Callable[[GraphModule, Any], Iterable[Any]], change: Callable[[Any, Any], Any]) -> Any:
    """An edit that makes `change(node, option)` with one of the options that the graph has for a node."""
    def edit(gm: GraphModule, rng: Random, node: Any) -> Any:
        found = list(options(gm, node))
        return change(node, rng.choice(found)) if found else None

    return edit


# places


def inputs(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="placeholder"))


def order_of(gm: GraphModule) -> dict[Node, int]:
    """Each node's place in node order."""
    return {node: place for place, node in enumerate(gm.graph.nodes)}


def face(node: Any) -> tuple[str, ...] | None:
    """Shape, dtype and device of a node's tensor; None where its value is no tensor.

    A size that is known only in a step is "?", since its symbol differs from world to world.
    """
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    shape = ", ".join(str(size) if isinstance(size, int) else "?" for size in value.shape)
    return shape, str(value.dtype), value.device.type


def are_twins(one: Any, other: Any) -> bool:
    """Whether two values are of one face."""
    return face(one) == face(other) and one is not other


def twins(nodes: Iterable[Any], node: Any) -> list[Any]:
    """The nodes of the same face as `node`, without itself."""
    return [n for n in nodes if are_twins(n, node)]


def floating(node: Any) -> bool:
    """Whether the node's value is a floating-point tensor with elements."""
    return face(node) is not None and node.meta["val"].is_floating_point() and node.meta["val"].numel() != 0


def is_start(node: Any) -> bool:
    """Whether the node starts a collective, so that nothing may read its result but a wait."""
    return isinstance(node, Node) and node.op == "call_function" and collective_kind(node.target) is not None


def starts(gm: GraphModule) -> list[Node]:
    """The collectives that one wait ends, with a plain tensor as their first argument."""
    return [n for n in calls(gm) if is_start(n) and len(waits_of(n)) == 1 and isinstance(n.args[0], Node)]


def pure(node: Node) -> bool:
    """Whether the node only computes: no collective or wait, nothing drawn, nothing written."""
    return (isinstance(node.target, TORCH_OPERATORS) and not is_start(node) and not is_wait(node.target)
            and not is_random(node) and not writes(node.target))


def pure_floats(gm: GraphModule) -> list[Node]:
    return [n for n in calls(gm) if floating(n) and pure(n)]


def values(gm: GraphModule) -> list[Node]:
    """The nodes whose tensors a reader may take: inputs and results, without the handles of running collectives."""
    return [n for n in gm.graph.nodes if n.op in ("placeholder", "call_function") and face(n) and not is_start(n)]


def earlier(gm: GraphModule, node: Node) -> list[Node]:
    """The values that exist before `node` runs."""
    order = order_of(gm)
    return [n for n in values(gm) if order[n] < order[node]]


def tensor_places(node: Node) -> list[int]:
    """The places of a node's arguments that are tensors."""
    return [i for i, value in enumerate(node.args) if face(value)]


# edits


def drop(node: Node, instead: Node) -> list[str]:
    """The node is erased, and its readers read `instead`. The names of all of these."""
    names = [node.name, *reread(node, instead)]
    node.graph.erase_node(node)
    return names


def with_argument(node: Node, place: int, value: Any) -> list[Any]:
    node.args = (*node.args[:place], value, *node.args[place + 1:])
    return [node]


def with_target(node: Node, target: Any) -> list[Any]:
    node.target = target
    return [node]


def exchanged(rng: Random, items: Sequence[Any], alike: Callable[[Any, Any], bool]) -> list[Any] | None:
    """The items, two of which have changed places; None where no two are alike."""
    pairs = [(i, j) for j in range(len(items)) for i in range(j) if alike(items[i], items[j])]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    changed = list(items)
    changed[i], changed[j] = items[j], items[i]
    return changed


def settle(gm: GraphModule, touched: Sequence[str]) -> bool:
    """Restate the values in the metadata of what depends on the touched nodes; False where an operator refuses.

    A careful author of a pass does this, and then no check can go by what the metadata says.
    """
    changed: set[Node] = set()
    for node in calls(gm):
        if "val" not in node.meta or not (
                isinstance(node.target, TORCH_OPERATORS) or node.target is operator.getitem):
            continue
        if node.name in touched or changed.intersection(node.all_input_nodes):
            try:
                with without_log():
                    value = computed(node)
            except Exception:  # whatever an operator raises for arguments that do not fit
                return False
            if _layout(value) != _layout(node.meta["val"]):
                node.meta["val"] = value
                changed.add(node)
    return True


def _layout(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_layout(each) for each in value]
    return (str(value.shape), value.dtype, str(value.stride())) if isinstance(value, torch.Tensor) else type(value)
