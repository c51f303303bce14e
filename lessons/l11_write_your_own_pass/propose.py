"""Propose a contract for a pass from its first run."""

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

ROUNDING = 1e-2  # norm-relative: a larger difference is not rounding
MARGIN = 4.0  # the proposed tolerance over the difference of this run


@dataclass(frozen=True)
class Proposal:
    """What a pass did in one run, and the contract that fits it. Its repr is the decorator to write above the function.

    changed: operators added (positive) and removed, of the joint graph, or of forward and backward together.
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
    """Run `recipe` with the registered pass `name`, on real ranks, and propose the contract that the pass kept.

    A recipe that does not list the pass gets it at the end of the list of its stage. world: as for `run`. One run
    proves nothing for other models and meshes: state the contract that you intend, and let the verdicts check it.
    Raises WorkbenchError where the pass changed nothing, or its results differ by more than rounding.
    """
    stage = find_pass(name).contract.stage
    recipe = _listing(load_recipe(recipe) if isinstance(recipe, str) else recipe, name, stage)
    with _exact(name):
        answers = on_ranks(recipe, world, _seen, name, timeout=timeout, progress=True)
    changed, effect, found = answers[0]
    if effect is not None and effect.outcome is Outcome.NO_EFFECT:
        raise WorkbenchError(f"pass {name!r} did nothing to recipe {recipe.name!r} ({effect.message}): try a recipe "
                             "that has what it looks for")
    worst = 0.0 if found.outcome is Outcome.PASS else float(found.evidence.get("worst", math.inf))
    if found.outcome is not Outcome.PASS and not 0.0 < worst < ROUNDING:
        raise WorkbenchError(f"pass {name!r} keeps no contract: {found.message}")
    sums = any(kind in op for op in changed for kind in COLLECTIVE_KINDS)  # reductions may have another order
    numerics = Numerics.EXACT if worst == 0.0 else Numerics.REDUCTION_ORDER if sums else Numerics.LOSSY
    says = ", ".join(f"{abs(count)} {'more' if count > 0 else 'fewer'} {op}" for op, count in changed.most_common())
    contract = replace(
        find_pass(name).contract, numerics=numerics, changes=says or "the same operators in another order",
        tolerance=_rounded_up(MARGIN * worst) if numerics is Numerics.LOSSY else None,
    )
    return Proposal(contract, dict(changed), worst, recipe.mesh.world_size)


def _seen(recipe: Recipe, name: str, post: Post) -> tuple[Counter[str], Verdict | None, Verdict]:
    """On each rank: the operators that the pass adds and removes, its effect, and its numerics, the same on all."""
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
    """Inside, the pass promises EXACT, so that its numerics verdict holds the largest difference."""
    item = find_pass(name)
    install_passes([replace(item, contract=replace(item.contract, numerics=Numerics.EXACT, tolerance=None))])
    try:
        yield
    finally:
        install_passes([item])


def _rounded_up(value: float) -> float:
    """Rounded up to one digit."""
    unit = 10.0 ** math.floor(math.log10(value))
    return math.ceil(value / unit) * unit
