"""The plan that adds least time within a budget, alike for alike layers unless that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from fnmatch import fnmatchcase

from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import layer_of, module_path
from workbench.graph.saving.plan import Act, Choice, MemoryPlan
from workbench.graph.saving.solver import Key, Solution, solve
from workbench.graph.saving.values import Producer
from workbench.torch_api.ops import short_name

ENOUGH = 0.02
"""A plan whose time is within this share of the bound is taken, before plans that treat alike layers differently."""


def fix(producers: Sequence[Producer], keep: Sequence[str], recompute: Sequence[str]) -> None:
    """Follow the user's patterns `MODULE` or `MODULE:OPERATOR`, with `*` for any text.

    Raises WorkbenchError for a pattern that matches nothing, for two that contradict, and for what cannot run again.
    """
    free = [made for made in producers if not made.holds_parameters]
    chosen: dict[Producer, tuple[str, str]] = {}
    option = {"saved": "keep", "repeated": "recompute"}
    for act, patterns in (("saved", keep), ("repeated", recompute)):
        for pattern in patterns:
            found = [made for made in free if _matches(pattern, made)]
            if not found:
                some = ", ".join(dict.fromkeys(f"{module_path(m.node)}:{short_name(m.node)}" for m in free))
                raise WorkbenchError(f"memory_budget: {pattern!r} matches no forward operator; there are {some[:400]}")
            for made in found:
                other, own = chosen.get(made, (act, ""))
                if other != act:
                    raise WorkbenchError(f"memory_budget: {option[other]} {own!r} and {option[act]} {pattern!r} both "
                                         f"match {made.node.name} ({module_path(made.node)}): let one leave it out")
                if act == "repeated" and made.fixed == "saved":
                    raise WorkbenchError(f"memory_budget: recompute {pattern!r} matches {made.node.name} "
                                         f"({module_path(made.node)}:{short_name(made.node)}), which must be saved: "
                                         f"{made.why}")
                chosen[made] = act, pattern
    for made, (act, pattern) in chosen.items():
        if not made.fixed:
            made.fixed, made.why = act, f"{option[act]} {pattern}"


def _matches(pattern: str, made: Producer) -> bool:
    module, _, operator = pattern.partition(":")
    return fnmatchcase(module_path(made.node), module) and fnmatchcase(short_name(made.node), operator or "*")


def choose(producers: Sequence[Producer], budget: int, device: str) -> MemoryPlan:
    """Raises WorkbenchError where not even the fewest bytes fit into the budget."""
    fewest = solve(producers, float("inf"), fewest=True, alike=_alike(producers))
    assert fewest is not None
    if budget < fewest.bytes:
        holders = sorted(fewest.saved, key=lambda each: -each.bytes)[:4]
        text = ", ".join(f"{e.node.name} of {module_path(e.node) or 'no module'} ({e.bytes:,} bytes"
                         f"{': ' + e.producer.why if e.producer.why else ''})" for e in holders)
        raise WorkbenchError(f"memory_budget: a budget of {budget:,} bytes is less than the {fewest.bytes:,} that must "
                             f"be saved at least; most of it holds {text}: give a larger budget")
    relaxed = solve(producers, budget, relaxed=True)
    bound = relaxed.bound_ms if relaxed is not None else 0.0
    best: Solution | None = None
    for key in _keys(producers):
        found = solve(producers, budget, alike=key)
        if found is not None and (best is None or found.ms < (1 - ENOUGH) * best.ms):
            best = found
        if best is not None and best.ms <= (1 + ENOUGH) * bound:
            break
    assert best is not None
    decided = sum(made.ms for made in producers if made.decided and made in best.repeated)
    return MemoryPlan(budget, fewest.bytes, min(bound, best.ms), device, tuple(_rows(producers, best)), decided)


def _rows(producers: Sequence[Producer], chosen: Solution) -> Iterator[Choice]:
    for made in producers:
        ms = 0.0 if made.decided else made.ms
        for each in made.results:
            if each in chosen.saved or made in chosen.repeated:
                act: Act = "save" if each in chosen.saved else "recompute"
                yield Choice(each.node.name, module_path(each.node), short_name(made.node), each.bytes, ms, act,
                             made.why)
                ms = 0.0


def _layers(producers: Sequence[Producer]) -> dict[int, list[Producer]]:
    layers: dict[int, list[Producer]] = defaultdict(list)
    for made in producers:
        if (layer := layer_of(made.node)) is not None:
            layers[layer].append(made)
    return layers


def _classes(producers: Sequence[Producer]) -> list[list[int]]:
    """Layers that hold the same operators on the same sizes with the same prices, in classes; the largest first."""
    classes: dict[Hashable, list[int]] = defaultdict(list)
    for layer, inside in _layers(producers).items():
        signature = tuple((short_name(m.node), round(m.ms, 9), m.fixed, *((e.bytes, e.read) for e in m.results))
                          for m in inside)
        classes[signature].append(layer)
    return sorted(classes.values(), key=lambda layers: -len(layers))


def _alike(producers: Sequence[Producer], first: int = 0) -> Key:
    """Layers of one class are treated alike, but for the `first` ones of the largest class, alike among themselves."""
    layers = _layers(producers)
    place = {made: i for inside in layers.values() for i, made in enumerate(inside)}
    group = {layer: (number, number == 0 and i < first)
             for number, same in enumerate(_classes(producers)) for i, layer in enumerate(same)}

    def key(made: Producer) -> Hashable:
        layer = layer_of(made.node)
        return made if layer is None else (*group[layer], place[made])

    return key


def _keys(producers: Sequence[Producer]) -> Iterator[Key]:
    """All alike, then the largest class in two parts."""
    yield _alike(producers)
    classes = _classes(producers)
    for first in range(1, len(classes[0]) if classes else 0):
        yield _alike(producers, first)

