"""What one pass of one run did, and the table of checks.

A verdict is computed when it is shown. What a check has read of graphs that change no more is kept for the next time.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch.fx import GraphModule

from workbench.checks import collectives, effect, lint, numerics
from workbench.checks.authoring import check_authoring
from workbench.checks.verdicts import Outcome, Verdict, verdict_of, worst
from workbench.errors import UnusableGraph, no_exit, shown_file
from workbench.graph.facts import Known, Order, Part
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.recipe.contracts import PassContract, Stage
from workbench.torch_api.garbage import uncollected

T = TypeVar("T")
TAGS = "the pass only tags nodes: what the partitioner makes of the tags is known once the joint graph is partitioned"


@dataclass
class PassRecord:
    """One pass of one run: its input, its output, and how long it took.

    item: the pass as it was registered when it ran. `before` and `after` are one joint graph, the forward and the
    backward, or the whole step; a lowering pass leaves callables, and a replay pass takes and leaves bodies. A pass
    works on a copy of a graph, so that both stay unchanged. Seconds are wall time; copying the graph counts as
    verification. order: of the collectives, as an earlier pass had chosen it; chosen_order: as this pass did.
    compared: the values of `after` against `before`, each rank's `Comparison`.
    """

    item: RegisteredPass
    options: Any
    before: Graphs
    after: tuple[Any, ...]
    seconds: float
    verify_seconds: float
    known: Known = field(default_factory=Known, repr=False)
    order: Order | None = field(default=None, repr=False)
    chosen_order: Order | None = field(default=None, repr=False)
    compared: list[numerics.Comparison] | None = None
    _readings: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.item.name

    @property
    def stage(self) -> Stage:
        return self.item.contract.stage

    @property
    def has_graphs(self) -> bool:
        """Whether the pass made graphs, and not compiled callables or replayed ones."""
        return all(isinstance(output, GraphModule) for output in self.after)

    @property
    def at_capture(self) -> bool:
        """Whether the capture had done the pass's work, so that `before` is no graph to compare `after` with."""
        return getattr(self.options, "at_capture", False)

    @property
    @no_exit()
    @uncollected()
    def verdicts(self) -> list[Verdict]:
        """The verdict of each check that has one, by what is known now."""
        verdicts = [check(self, self.known) for check in PASS_CHECKS]
        return [verdict for verdict in verdicts if verdict is not None]

    @property
    def outcome(self) -> Outcome:
        return worst(self.verdicts)

    def verdict(self, check: str) -> Verdict | None:
        """The verdict of that check; None where it has none."""
        return verdict_of(self.verdicts, check)

    @property
    def malformed(self) -> bool:
        """Whether no other check can read the graphs that the pass made."""
        verdict = check_lint(self, self.known)
        return verdict is not None and bool(verdict.evidence.get("malformed"))

    @property
    def broken(self) -> UnusableGraph | None:
        """The error for a later stage that is given the graphs of this record; None where it can take them."""
        verdict = check_lint(self, self.known)
        if verdict and verdict.evidence.get("unusable"):
            return UnusableGraph(self.name, verdict.message + _defined_at(self.item))
        return None

    def judge_by(self, contract: PassContract) -> None:
        """Hold the pass to another contract from now on."""
        self.item = replace(self.item, contract=contract)
        self._readings.clear()

    def fork(self, known: Known) -> PassRecord:
        """The same record of another run, which may be partitioned otherwise."""
        readings = dict(self._readings)
        readings.pop(self.item.partition_effect, None)
        return replace(self, known=known, _readings=readings)

    def reading(self, read: Callable[..., T], *args: Any) -> T:
        """`read(*args)`, from memory the second time: `args` are the record's. Its time counts as verification."""
        if read not in self._readings:
            started = time.perf_counter()
            self._readings[read] = read(*args)
            self.verify_seconds += time.perf_counter() - started
        result: T = self._readings[read]
        return result

    @property
    def parts(self) -> tuple[Part, ...]:
        """The names of its graphs: ("joint",), ("forward", "backward"), or ("step",)."""
        if len(self.before) == 2:
            return ("forward", "backward")
        return ("joint",) if self.stage is Stage.JOINT else ("step",)

    def __repr__(self) -> str:
        return f"PassRecord({self.name}, {self.stage}, {self.outcome}: {'; '.join(map(str, self.verdicts))})"


def _defined_at(item: RegisteredPass) -> str:
    """` (defined at FILE, line N)` of a user's pass; "" for one of the package."""
    code = getattr(inspect.unwrap(item.function), "__code__", None)
    if item.contract.source != "user" or code is None:
        return ""
    return f" (defined at {shown_file(code.co_filename)}, line {code.co_firstlineno})"


def check_lint(record: PassRecord, known: Known) -> Verdict | None:
    """Whether the next stage can run the graphs; None for callables, which have none to look at."""
    if not record.has_graphs:
        return None
    return record.reading(lint.lint, record.before, record.after)


def check_effect(record: PassRecord, known: Known) -> Verdict:
    """By the pass's own predicate on its graphs; then by the partition, if it tags nodes for that; then by what a step
    ran; and NO_EFFECT with the stage that lost it, if a later one lost the order that the pass had chosen.
    """
    if record.malformed:
        return Verdict("effect", Outcome.UNKNOWN, lint.MALFORMED)
    item = record.item
    graphs = item, record.before, record.after, record.options
    # a body counts its replays, so that its effect is another after each step
    changes = record.stage is Stage.REPLAY
    result = effect.of_graphs(*graphs) if changes else record.reading(effect.of_graphs, *graphs)
    if result.happened and item.partition_effect is not None:
        if known.partitioned is None:
            return Verdict("effect", Outcome.UNKNOWN, TAGS, result.evidence)
        tags = record.reading(item.partition_effect, known.partitioned, record.options)
        result = replace(tags, evidence=result.evidence | tags.evidence)
    if result.happened and item.executed is not None and known.ran is not None:
        ran = item.executed(result.evidence, known.ran)
        reason = "; ".join(filter(None, (ran.reason, result.reason if ran.happened else "")))
        result = replace(ran, reason=reason, evidence=result.evidence | ran.evidence)
    if result.happened and (lost := _lost_order(record, known)):
        result = Effect(False, lost, result.evidence)
    return effect.verdict(result)


def _lost_order(record: PassRecord, known: Known) -> str:
    """The stage that lost the order that this pass chose, and what it lost; "" where none did."""
    if record.chosen_order is None:
        return ""
    for later in _behind(record, known):
        kept = check_order(later, known)
        if kept is not None and kept.outcome is Outcome.FAIL and kept.evidence["chosen_by"] == record.name:
            return f"{later.name} lost the order that it chose: {kept.message}"
    for profile in check_profile(known):
        if profile.outcome is Outcome.FAIL and profile.evidence["chosen_by"] == record.name:
            return f"the GPU did not run the order that it chose: {profile.message}"
    return ""


def _behind(record: PassRecord, known: Known) -> list[PassRecord]:
    """The records behind this one, up to one that chooses an order itself."""
    place = next(
        (i for i, other in enumerate(known.records) if other is record), len(known.records)
    )
    later = known.records[place + 1:]
    end = next((i for i, other in enumerate(later) if other.chosen_order is not None), len(later))
    return later[:end]


def check_collectives(record: PassRecord, known: Known) -> Verdict | None:
    """Whether the graphs move what they moved, or what the pass promised; None for callables."""
    if not record.has_graphs:
        return None
    if record.malformed:
        return Verdict("collectives", Outcome.UNKNOWN, lint.MALFORMED)
    return record.reading(collectives.of_pass, record.item, record.before, record.after, record.options)


def check_order(record: PassRecord, known: Known) -> Verdict | None:
    """What a pass that chose an order hides by it; and of each later pass but a replay, whether it is kept."""
    if record.chosen_order is not None:
        verdict: Verdict = record.chosen_order.verdict()
        return verdict
    if record.order is None or not record.order.hidden or record.stage is Stage.REPLAY or record.broken:
        return None
    if record.has_graphs:
        return record.reading(record.order.kept_after, record.after)
    return record.reading(record.order.kept_in_code, record.before, record.after)


def check_numerics(record: PassRecord, known: Known) -> Verdict | None:
    """The pass's graph against the one that it received, on all ranks; None where that was not asked for."""
    if record.compared is not None:
        return numerics.verdict(record.compared)
    if known.no_values:
        return Verdict("numerics", Outcome.UNKNOWN, known.no_values)
    if record.at_capture and known.compared is not None:
        why = "done while tracing, so this pass received no other graph: see the whole list against eager"
        return Verdict("numerics", Outcome.UNKNOWN, why)
    return None


PASS_CHECKS: tuple[Callable[[PassRecord, Known], Verdict | None], ...] = (
    check_lint, check_effect, check_collectives, check_order, check_numerics)
"""On one pass, in the order of the columns. None: the check has nothing to say of this pass."""


def check_eager(known: Known) -> list[Verdict]:
    """The whole list of passes against eager, and UNKNOWN for what no comparison can see."""
    verdicts = []
    if known.compared is not None:
        verdicts.append(numerics.verdict(known.compared))
    elif known.no_values:
        verdicts.append(Verdict("numerics", Outcome.UNKNOWN, known.no_values))
    sources, why = known.side_effects
    if sources:
        message = f"the forward changes {', '.join(sources)} in Python, which the compiled step does not: {why}"
        verdicts.append(Verdict("numerics", Outcome.UNKNOWN, message))
    return verdicts


def check_profile(known: Known) -> list[Verdict]:
    """Whether the collectives that a pass had hidden ran behind compute on this rank's GPU; none without a profile."""
    if known.profile is None:
        return []
    order, *measured = known.profile
    return [order.in_profile(*measured)]


def check_plugins(known: Known) -> list[Verdict]:
    """The verdicts of the plugins whose capture or kind of step made this step."""
    return [verdict for check in known.checks for verdict in check(known)]


STEP_CHECKS: tuple[Callable[[Known], list[Verdict]], ...] = (
    check_plugins, check_eager, check_authoring, check_profile)
"""On the whole list of passes."""


@no_exit()
def step_verdicts(known: Known) -> list[Verdict]:
    """The verdicts on the whole list of passes, by what is known now."""
    return [verdict for check in STEP_CHECKS for verdict in check(known)]
