"""Passes by name: a function, its contract, and the predicate that says whether it had its effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.read.collectives import Collective
from workbench.graph.read.timeline import Costs
from workbench.passes.effect import Effect
from workbench.recipe.contracts import CONTRACTS, Numerics, Options, PassContract, Stage, declare, package_contracts
from workbench.world.registered import known_on_ranks

Graphs = tuple[GraphModule, ...]
PassFunction = Callable[..., Any]
EffectPredicate = Callable[[Any, Any, Any], Effect]


@dataclass(frozen=True)
class RegisteredPass:
    """`effect(before, after, options)` sees one joint graph, the forward and the backward, or their bodies.

    `partition_effect(forward_and_backward, options)` is for joint passes that only tag nodes: what the partitioner
    made of the tags. `order_costs(options, graph)` is for passes that choose an order of the collectives: the costs by
    which they chose, which the check `order` holds later stages to. `promised(before, options)` is for passes that
    change what collectives move: the collectives of the graph that they make. `executed(evidence, names, times)` says
    whether a step ran what the pass made: evidence of its effect, names of the step's operators on a CPU, or kernels on
    a GPU, with their counts, and how many microbatches a step has.
    """

    contract: PassContract
    function: PassFunction
    effect: EffectPredicate
    partition_effect: Callable[[Graphs, Any], Effect] | None = None
    order_costs: Callable[[Any, GraphModule], Costs] | None = None
    promised: Callable[[Graphs, Any], list[Collective]] | None = None
    executed: Callable[[Mapping[str, Any], Counter[str], int], Effect] | None = None

    @property
    def name(self) -> str:
        return self.contract.name


_PASSES: dict[str, RegisteredPass] = {}
"""What was registered in this process. A name that is not here may be a pass of the package."""


def graph_changed(before: Graphs, after: Graphs, options: Any) -> Effect:
    """The weakest effect: some node's target or arguments differ, or a graph is a callable now, or a body another.

    The default of `register_pass`.
    """
    if not all(isinstance(gm, GraphModule) for gm in (*before, *after)):
        same = all(b is a for b, a in zip(before, after, strict=True))
        return Effect(not same, "the pass returned what it was given" if same else "", {})

    def listing(graph: GraphModule) -> list[str]:
        return [n.format_node() or str(n) for n in graph.graph.nodes]

    changed = any(listing(b) != listing(a) for b, a in zip(before, after, strict=True))
    return Effect(changed, "" if changed else "every node is as it was before the pass", {})


def register_pass(
    name: str,
    *,
    stage: Stage | str | None = None,
    numerics: Numerics | str | None = None,
    tolerance: float | None = None,
    changes: str = "",
    options: type[Options] = Options,
    conflicts: set[str] | frozenset[str] = frozenset(),
    requires: set[str] | frozenset[str] = frozenset(),
    after: set[str] | frozenset[str] = frozenset(),
    needs: set[str] | frozenset[str] = frozenset(),
    fewer_bytes: bool = False,
    effect: EffectPredicate = graph_changed,
    partition_effect: Callable[[Graphs, Any], Effect] | None = None,
    order_costs: Callable[[Any, GraphModule], Costs] | None = None,
) -> Callable[[PassFunction], PassFunction]:
    """Register `function(gm, example_inputs, *, options) -> gm` under `name`; a replay pass gets and gives a body.

    State `stage` and `numerics`; without a stage, `name` is a known pass, whose contract stays. Registering a name
    again replaces it, so that a notebook cell can be run twice. The package's passes are not registered: `find_pass`
    finds them by their folder.
    """
    if stage is not None:
        contract = PassContract(
            name, Stage(stage), Numerics(numerics or Numerics.EXACT), changes or "states no change", options, tolerance,
            frozenset(requires), frozenset(conflicts), frozenset(after), frozenset(needs), fewer_bytes, "user",
        )
    elif name in CONTRACTS:
        contract = CONTRACTS[name]
    else:
        raise WorkbenchError(f"pass {name!r} has no contract: state its stage, for example stage='joint'")

    def register(function: PassFunction) -> PassFunction:
        declare(contract)
        _PASSES[name] = RegisteredPass(contract, function, effect, partition_effect, order_costs)
        return function

    return register


def find_pass(name: str) -> RegisteredPass:
    """The registered pass, or else the package's; raises WorkbenchError with the known names."""
    if name in _PASSES:
        return _PASSES[name]
    if name in package_contracts():
        found: RegisteredPass = import_module(f"workbench.passes.{name}.transform").PASS
        return found
    known = ", ".join(sorted({*_PASSES, *package_contracts()}))
    raise WorkbenchError(f"unknown pass {name!r}: register it with @register_pass, or use one of {known}")


def own_passes() -> list[RegisteredPass]:
    """The passes that a user registered in this process."""
    return [p for p in _PASSES.values() if p.contract.source == "user"]


def install_passes(passes: list[RegisteredPass]) -> None:
    """Register passes that came from another process."""
    for item in passes:
        declare(item.contract)
        _PASSES[item.name] = item


known_on_ranks("pass", own_passes, install_passes)
