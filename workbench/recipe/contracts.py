"""What a pass can promise: its stage, its numerics, its options, its place in the list; and the table of promises."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from pydantic import BaseModel, ConfigDict

from workbench.recipe.plugins import load_plugins


class Stage(StrEnum):
    """When a pass runs."""

    JOINT = "joint"
    PARTITIONED = "partitioned"
    STEP = "step"
    LOWERING = "lowering"
    REPLAY = "replay"


class Numerics(StrEnum):
    """How far a pass may move results from those of the graph it received."""

    EXACT = "exact"
    REDUCTION_ORDER = "reduction_order"
    LOSSY = "lossy"


class Options(BaseModel):
    """Base of every pass's option model: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def at_capture(self) -> bool:
        """Whether the capture does the pass's work, so that the pass receives no graph to compare its own with."""
        return False


class EstimateOptions(Options):
    """For passes that schedule by estimated times. device: a name, or the file of a machine that `calibrate` wrote."""

    device: str = "h100"


@dataclass(frozen=True)
class PassContract:
    """The promise of one pass.

    `after` names passes that must stand earlier in the list where both are listed; `needs` names what the recipe or
    the machine must have: "fsdp", "cuda", "compiler", "static_shapes", "pair" (forward and backward apart),
    "partitioner" (torch's, which decides what has no tag).
    `tolerance` is the norm-relative bound of a LOSSY pass on the loss and each gradient. `fewer_bytes`: the pass may
    take bytes out of the step's collectives, as one does that gathers a weight once and not twice. `repeats`: it may
    launch collectives of the graph again on the same values, as recomputation does. `source`: where the
    idea is from; "user" for a user's own. `code`: the module that registers a declared pass when it is imported.
    """

    name: str
    stage: Stage
    numerics: Numerics
    changes: str
    options: type[Options] = Options
    tolerance: float | None = None
    requires: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    fewer_bytes: bool = False
    repeats: bool = False
    source: str = field(default="", compare=False)
    code: str = field(default="", compare=False)

    @property
    def home(self) -> str:
        """The module that explains a pass of the package, or of a plugin: its file, or the folder of its code."""
        return self.code.rpartition(".")[0] if self.code else f"workbench.passes.{self.name}"

    def __post_init__(self) -> None:
        if (self.numerics is Numerics.LOSSY) != (self.tolerance is not None):
            raise ValueError(
                f"pass {self.name!r}: a LOSSY pass states a tolerance, and only a LOSSY pass does"
            )


_STAGE_ORDER = {stage: i for i, stage in enumerate(Stage)}
_PASSES = Path(__file__).parents[1] / "passes"


class _Contracts(UserDict[str, PassContract]):
    """Contracts by pass name.

    A pass of the package is one file of `workbench/passes`, which registers it when it is imported: the first question
    for its name does so, and imports torch. Plugins declare theirs without torch.
    """

    def __contains__(self, name: object) -> bool:
        if name not in self.data and isinstance(name, str):
            if name.isidentifier() and (_PASSES / f"{name}.py").is_file():
                import_module(f"workbench.passes.{name}")
            else:
                load_plugins()
        return name in self.data

    def __getitem__(self, name: str) -> PassContract:
        if name not in self:
            raise KeyError(name)
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        for info in iter_modules([str(_PASSES)]):
            import_module(f"workbench.passes.{info.name}")
        return iter(_listed(self.data))


def _listed(contracts: Mapping[str, PassContract]) -> list[str]:
    """The names in an order in which a recipe may list them."""

    def ahead(name: str) -> int:
        """How many passes come before this one, and before those."""
        predecessors, todo = set[str](), [name]
        while todo:
            new = (contracts[todo.pop()].after & set(contracts)) - predecessors
            predecessors |= new
            todo += new
        return len(predecessors)

    return sorted(
        contracts, key=lambda name: (_STAGE_ORDER[contracts[name].stage], ahead(name), name)
    )


CONTRACTS = _Contracts()
GONE = {"chunked_loss": 'model.loss = "workbench.lab.chunked_loss.loss:in_pieces:8"'}
"""Passes of the last release, and what stands in their place."""


def package_contracts() -> dict[str, PassContract]:
    """The contracts of all passes but the user's own, in an order in which a recipe may list them."""
    return {name: contract for name, contract in CONTRACTS.items() if contract.source != "user"}


def declare(contract: PassContract) -> PassContract:
    """Add a contract to the table that recipes are checked against; a second one replaces the first."""
    CONTRACTS[contract.name] = contract
    return contract


def check_passes(
    joint_passes: Sequence[str], passes: Sequence[str], *, free_order: bool = False
) -> list[str]:
    """Every broken rule of a declared pass list, each as one sentence with the pass, the rule and the fix.

    Names that have no contract yet are left to `build`, which knows the user's own passes. free_order: passes of one
    stage may stand in any order.
    """
    problems: list[str] = []
    listed = [*joint_passes, *passes]
    for name in sorted({n for n in listed if listed.count(n) > 1}):
        problems.append(f"pass {name!r} is listed twice: list it once")
    for where, names in (("joint_passes", joint_passes), ("passes", passes)):
        for name in names:
            contract = CONTRACTS.get(name)
            if contract is None:
                continue
            right = _list_of(contract)
            if right != where:
                problems.append(
                    f"pass {name!r} runs on the {contract.stage} stage: move it from {where} to {right}"
                )
    known = [CONTRACTS[n] for n in dict.fromkeys(listed) if n in CONTRACTS]
    for i, contract in enumerate(known):
        for other in sorted(contract.requires - set(listed)):
            problems.append(f"pass {contract.name!r} requires {other!r}: add it to "
                            f"{_list_of(CONTRACTS.get(other, contract))}, before it")
        for earlier in known[:i]:
            if earlier.name in contract.conflicts or contract.name in earlier.conflicts:
                problems.append(
                    f"passes {earlier.name!r} and {contract.name!r} conflict: keep one of them"
                )
        for later in known[i + 1:]:
            problems += (
                [] if free_order and later.stage is contract.stage else _misordered(contract, later)
            )
    lowering = [c.name for c in known if c.stage is Stage.LOWERING]
    if len(lowering) > 1:
        problems.append(
            f"passes {' and '.join(map(repr, lowering))} both lower the graph: keep one of them"
        )
    return problems


def _list_of(contract: PassContract) -> str:
    return "joint_passes" if contract.stage is Stage.JOINT else "passes"


def check_step(passes: Sequence[str], step: str) -> list[tuple[int, str]]:
    """(place in the list, problem) of each pass that cannot run where the step is a "pair", or of another kind."""
    problems = []
    for i, contract in enumerate(map(CONTRACTS.get, passes)):
        if contract is None:
            continue
        if contract.stage is Stage.STEP and step == "pair":
            problems.append(
                (
                    i,
                    f"pass {contract.name!r} runs on the whole step in one graph, and training.step is "
                    '"pair": set it to "whole", or drop the pass',
                )
            )
        if "pair" in contract.needs and step != "pair":
            problems.append(
                (
                    i,
                    f"pass {contract.name!r} needs forward and backward apart, and training.step is "
                    f'"{step}": set it to "pair", or drop the pass',
                )
            )
    return problems


def check_capture(names: Sequence[str], capture: str) -> list[tuple[str, str]]:
    """(pass, problem) of each pass that cannot run on the capture of a plugin, which has no partitioner."""
    needing = [
        name for name in names if name in CONTRACTS and "partitioner" in CONTRACTS[name].needs
    ]
    return [(name, f"pass {name!r} needs torch's partitioner, and capture is \"{capture}\", which has none: set it to "
                   '"joint", or drop the pass') for name in needing if capture not in ("joint", None)]


def _misordered(first: PassContract, second: PassContract) -> list[str]:
    """The rule broken by `first` standing before `second`, if any."""
    if second.name in first.after | first.requires:
        return [f"pass {second.name!r} must come before {first.name!r}: swap them"]
    # a joint pass in the wrong list is told so already
    if second.stage is not Stage.JOINT and _STAGE_ORDER[second.stage] < _STAGE_ORDER[first.stage]:
        return [
            f"pass {second.name!r} ({second.stage}) must come before {first.name!r} ({first.stage}): swap them"
        ]
    return []
