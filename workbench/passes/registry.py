"""Passes by name: a function, its contract, and the predicate that says whether it had its effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.passes.effect import Effect
from workbench.recipe.contracts import CONTRACTS, Numerics, Options, PassContract, Stage, declare, package_contracts
from workbench.recipe.plugins import known_on_ranks, load_plugins

Graphs = tuple[GraphModule, ...]
PassFunction = Callable[..., Any]
EffectPredicate = Callable[[Any, Any, Any], Effect]


@dataclass(frozen=True)
class RegisteredPass:
    """`effect(before, after, options)` sees one joint graph, the forward and the backward, or their bodies.

    `partition_effect(forward_and_backward, options)` is for joint passes that only tag nodes: what the partitioner
    made of the tags. `order_costs(options, graph)` is for passes that choose an order of the collectives: the Costs
    by which they chose, which the check `order` holds later stages to. `promised(before, options)` is for passes that
    change what collectives move: a Collective for each of the graph that they make. `executed(evidence, names)` says
    whether a step ran what the pass made: evidence of its effect, names of the step's operators on a CPU, or kernels on
    a GPU, with their counts.
    """

    contract: PassContract
    function: PassFunction
    effect: EffectPredicate
    partition_effect: Callable[[Graphs, Any], Effect] | None = None
    order_costs: Callable[[Any, GraphModule], Any] | None = None
    promised: Callable[[Graphs, Any], list[Any]] | None = None
    executed: Callable[[Mapping[str, Any], Counter[str]], Effect] | None = None

    @property
    def name(self) -> str:
        return self.contract.name


_PASSES: dict[str, RegisteredPass] = {}
NEEDS = frozenset({"fsdp", "cuda", "compiler", "static_shapes", "pair", "partitioner"})
"""What a pass may need of the recipe or the machine: see PassContract."""


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
    conflicts: Collection[str] = (),
    requires: Collection[str] = (),
    after: Collection[str] = (),
    needs: Collection[str] = (),
    fewer_bytes: bool = False,
    repeats: bool = False,
    effect: EffectPredicate = graph_changed,
    partition_effect: Callable[[Graphs, Any], Effect] | None = None,
    order_costs: Callable[[Any, GraphModule], Any] | None = None,
    promised: Callable[[Graphs, Any], list[Any]] | None = None,
    executed: Callable[[Mapping[str, Any], Counter[str]], Effect] | None = None,
    source: str = "user",
) -> Callable[[PassFunction], PassFunction]:
    """Register `function(gm, example_inputs, *, options) -> gm` under `name`; a replay pass gets and gives a body.

    State `stage` and `numerics`; without a stage, `name` is a known pass, whose contract stays. Registering a name
    again replaces it, so that a notebook cell can be run twice. The other arguments are those of PassContract and of
    RegisteredPass. source: where the idea is from, or "workbench", for a pass of the package; of a "user" the names are
    checked, and a claimed effect without any change is refused. Raises WorkbenchError for a name in `needs`, `after`,
    `requires` or `conflicts` that nothing has.
    """
    if stage is not None:
        contract = PassContract(
            name, Stage(stage), Numerics(numerics or Numerics.EXACT), changes or "states no change", options, tolerance,
            frozenset(requires), frozenset(conflicts), frozenset(after), frozenset(needs), fewer_bytes, repeats, source,
        )
        if source == "user":
            load_plugins()  # first, or they would replace it later
            _require_known(contract)
    elif name in CONTRACTS:
        contract = CONTRACTS[name]
    else:
        raise WorkbenchError(
            f"pass {name!r} has no contract: state its stage, for example stage='joint'"
        )

    def register(function: PassFunction) -> PassFunction:
        theirs = name in _PASSES and _PASSES[name].contract.source == "user"
        packaged = source != "user" or (
            stage is None and function.__module__.startswith("workbench.")
        )
        if not (theirs and packaged):  # the package's file may be imported after a user's cell
            declare(contract)
            _PASSES[name] = RegisteredPass(
                contract, function, effect, partition_effect, order_costs, promised, executed
            )
        return function

    return register


def _require_known(contract: PassContract) -> None:
    """Refuse what a user's contract names and nothing has: a rule that can never hold would never be told."""
    for rule in ("needs", "after", "requires", "conflicts"):
        known = NEEDS if rule == "needs" else CONTRACTS
        for name in sorted(getattr(contract, rule)):
            if name not in known:
                raise WorkbenchError(
                    f"pass {contract.name!r}: {rule} names {name!r}, which is none of "
                    f"{', '.join(sorted(known))}"
                )


def find_pass(name: str) -> RegisteredPass:
    """The registered pass; raises WorkbenchError with the known names."""
    if name in CONTRACTS and name not in _PASSES and CONTRACTS[name].code:
        import_module(CONTRACTS[name].code)
    if name not in _PASSES:
        known = ", ".join(sorted({*_PASSES, *package_contracts()}))
        raise WorkbenchError(
            f"unknown pass {name!r}: register it with @register_pass (--import FILE), or use one of {known}"
        )
    return _PASSES[name]


def user_passes() -> list[RegisteredPass]:
    """The passes that a user registered in this process."""
    return [p for p in _PASSES.values() if p.contract.source == "user"]


def install_passes(passes: list[RegisteredPass]) -> None:
    """Register passes that came from another process."""
    load_plugins()
    for item in passes:
        declare(item.contract)
        _PASSES[item.name] = item


known_on_ranks("pass", user_passes, install_passes)
