"""A contract for a pass that has none yet, read off its first run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.passes.registry import find_pass, install_passes
from workbench.pipeline.build import build
from workbench.pipeline.progress import Post
from workbench.pipeline.recipe_ranks import WorldChoice, on_ranks
from workbench.recipe.contracts import Numerics, PassContract, Stage
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.recipe.sections import PassSpec
from workbench.torch_api.ops import COLLECTIVE_KINDS
from workbench.world.mesh import current_world
from workbench.world.ranks import RankPool

ROUNDING = 1e-2  # norm-relative: what moves results further computes something else
MARGIN = 4.0  # between what one run differed by and the tolerance proposed for others


@dataclass(frozen=True)
class Proposal:
    """What a pass did in one run, and the contract that fits it. Shown, it is what to write above the function.

    changed: operators gained (positive) and lost, of the joint graph, or of forward and backward together.
    worst: the largest norm-relative difference of the loss and the gradients, on any rank; 0.0 is bitwise.
    """

    contract: PassContract
    changed: dict[str, int]
    worst: float
    ranks: int

    def __repr__(self) -> str:
        own = self.contract
        bound = "" if own.tolerance is None else f" tolerance={own.tolerance:.0e},"
        held = "bitwise" if self.worst == 0.0 else f"norm-relative {self.worst:.1e} apart"
        return (f'@register_pass("{own.name}", stage="{own.stage}", numerics="{own.numerics}",{bound}\n'
                f'               changes="{own.changes}")\n# on {self.ranks} ranks: {held}')


def propose_contract(
    name: str, recipe: Recipe | str, *, world: WorldChoice | RankPool = "auto", timeout: float = 600.0
) -> Proposal:
    """Run `recipe` with the registered pass `name` in its list, on real ranks, and say what contract it kept.

    A recipe that does not list the pass gets it at the end of the list of its stage. world: as for `run`. One run
    shows what a pass may do, and proves nothing for other models and meshes: state what you mean to hold, and let the
    verdicts watch it. WorkbenchError where the pass changed nothing, or its results are not those of the graph it
    received.
    """
    stage = find_pass(name).contract.stage
    recipe = _listing(load_recipe(recipe) if isinstance(recipe, str) else recipe, name, stage)
    with _exact(name):
        _, answers = on_ranks(recipe, world, _seen, name, stages=0, timeout=timeout, progress=False)
    changed, said, found = answers[0]
    if said is not None and said.outcome is Outcome.NO_EFFECT:
        raise WorkbenchError(f"pass {name!r} did nothing to recipe {recipe.name!r} ({said.message}): try a recipe that "
                             "has what it looks for")
    worst = 0.0 if found.outcome is Outcome.PASS else float(found.evidence.get("worst", math.inf))
    if found.outcome is not Outcome.PASS and not 0.0 < worst < ROUNDING:
        raise WorkbenchError(f"pass {name!r} keeps no contract: {found.message}")
    sums = any(kind in op for op in changed for kind in COLLECTIVE_KINDS)  # it may add them up in another order
    numerics = Numerics.EXACT if worst == 0.0 else Numerics.REDUCTION_ORDER if sums else Numerics.LOSSY
    says = ", ".join(f"{abs(count)} {'more' if count > 0 else 'fewer'} {op}" for op, count in changed.most_common())
    contract = replace(
        find_pass(name).contract, numerics=numerics, changes=says or "the same operators in another order",
        tolerance=_rounded_up(MARGIN * worst) if numerics is Numerics.LOSSY else None,
    )
    return Proposal(contract, dict(changed), worst, recipe.mesh.world_size)


def _seen(recipe: Recipe, name: str, post: Post) -> tuple[Counter[str], Verdict | None, Verdict]:
    """On each rank: the operators that the pass adds and takes, its effect, and its numerics, the same on all."""
    built = build(recipe.model_copy(update={"strict": False}), current_world(), level="full")
    built.step.close()
    record = next(r for r in built.records if r.name == name)
    changed: Counter[str] = Counter()
    for graph in record.diffs():
        changed.update(graph.by_op())
    numerics = record.verdict("numerics")
    assert numerics is not None
    return changed, record.verdict("effect"), numerics


def _listing(recipe: Recipe, name: str, stage: Stage) -> Recipe:
    if name in recipe.pass_names:
        return recipe
    where = "joint_passes" if stage is Stage.JOINT else "passes"
    specs = [*getattr(recipe, where), PassSpec(name=name)]
    return recipe.model_copy(update={where: tuple(specs), "strict": False})


@contextmanager
def _exact(name: str) -> Iterator[None]:
    """The pass promises every bit, so that its verdict says how far it is from that."""
    item = find_pass(name)
    install_passes([replace(item, contract=replace(item.contract, numerics=Numerics.EXACT, tolerance=None))])
    try:
        yield
    finally:
        install_passes([item])


def _rounded_up(value: float) -> float:
    """To one digit."""
    unit = 10.0 ** math.floor(math.log10(value))
    return math.ceil(value / unit) * unit
