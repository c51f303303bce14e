"""The choice of what is saved as an integer program, solved by HiGHS (highs.dev)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from workbench.errors import WorkbenchError
from workbench.graph.saving.host import exposed_ms
from workbench.graph.saving.values import HostCopy, Producer, Stored

_SECONDS = 20.0
_SCALE = 1e3  # of objective and budget, which HiGHS holds to an absolute tolerance
_TIE = 1e-6  # all bytes count like this share of all time, so that of equal times the fewest bytes win
Key = Callable[[Producer], Hashable]


@dataclass(frozen=True)
class Solution:
    """saved: owners of what is kept on the device, and sent: on the host. repeated: the operators that run again. ms:
    what the step takes longer, exposed_ms of it for copies. bound_ms: no choice takes less.
    """

    saved: frozenset[Stored]
    sent: frozenset[Stored]
    repeated: frozenset[Producer]
    ms: float
    exposed_ms: float
    bytes: int
    bound_ms: float


def solve(producers: Sequence[Producer], budget: float, *, alike: Key | None = None, relaxed: bool = False,
          fewest: bool = False) -> Solution | None:
    """The choice that adds least time while the saved bytes are at most `budget`; None where no choice fits.

    alike: producers of one key are treated alike. relaxed: with fractions, where only the bound counts. fewest: the
    fewest bytes instead, whatever they cost.

    A tensor that is needed is saved, sent to the host, or its producer repeated, and a repeated producer needs its
    inputs.
    """
    table = _Table(producers, alike or (lambda each: each), fewest)
    values, bound = table.run(budget, relaxed)
    if values is None:
        return None
    saved, sent, repeated = set[Stored](), set[Stored](), set[Producer]()
    todo = [each for made in producers for each in made.results if each.read]
    done = set(todo)
    while todo:  # only what the backward needs, whatever the solver set beside it
        each = todo.pop()
        made = each.producer
        if values[table.repeats(made)] < 0.5:
            (sent if each in table.links and values[table.saves(each)] < 0.5 else saved).add(each)
            continue
        repeated.add(made)
        fresh = [given for given in made.inputs if given not in done]
        done.update(fresh)
        todo += fresh
    exposed = exposed_ms(each.host for each in sent if each.host is not None)
    ms = sum(made.ms for made in repeated if not made.decided) + exposed
    return Solution(frozenset(saved), frozenset(sent), frozenset(repeated), ms, exposed,
                    sum(each.bytes for each in saved), bound)


class _Table:
    """Columns: whether each tensor is saved, whether it is sent to the host, and whether each producer is repeated;
    those of one class share one. Two more are how long copies are exposed, to the host and back.

    links: the tensors that may be sent.
    """

    def __init__(self, producers: Sequence[Producer], key: Key, fewest: bool):
        self._key = key
        self._columns: dict[Hashable, int] = {}
        self.time, self.bytes = defaultdict[int, float](float), defaultdict[int, int](int)
        self.zero = set[int]()
        self.links: dict[Stored, HostCopy] = {each: each.host for made in producers if made.fixed != "repeated"
                                              for each in made.results if each.host is not None}
        rows: set[tuple[tuple[int, ...], int]] = set()
        for made in producers:
            again = self.repeats(made)
            self.time[again] += 0.0 if made.decided else made.ms
            if made.fixed in ("saved", "sent"):
                self.zero.add(again)
            if made.fixed in ("repeated", "sent"):  # if the backward needs it at all
                self.zero |= {self.saves(each) for each in made.results}
            rows |= {((again, *self.holds(each)), -1) for each in made.results if each.read}
            rows |= {((self.repeats(each.producer), *self.holds(each)), again) for each in made.inputs}
            for each in made.results:
                self.bytes[self.saves(each)] += each.bytes
        self.rows = sorted(rows)
        self.all_ms, self.all_bytes = sum(self.time.values()) or 1.0, sum(self.bytes.values()) or 1
        self.fewest = fewest

    def repeats(self, made: Producer) -> int:
        return self._columns.setdefault(self._key(made), len(self._columns))

    def saves(self, each: Stored) -> int:
        place = each.producer.results.index(each)
        return self._columns.setdefault((self._key(each.producer), place, "saved"), len(self._columns))

    def holds(self, each: Stored) -> tuple[int, ...]:
        """The columns of where the tensor may be kept."""
        saves = self.saves(each)
        return (saves, self.column("sent", saves)) if each in self.links else (saves,)

    def column(self, *key: Hashable) -> int:
        return self._columns.setdefault(key, len(self._columns))

    def waits(self) -> Iterator[tuple[list[int], list[float], float]]:
        """Rows that hold the exposed time to what copies overrun the room of each tensor by; see `exposed_ms`."""
        for way in ("left", "due"):
            exposed, taken = self.column("exposed", way), defaultdict[int, float](float)
            listed = sorted(self.links.items(), key=lambda link: getattr(link[1], way))
            for each, copy in listed:
                taken[self.column("sent", self.saves(each))] -= _SCALE * copy.ms / self.all_ms
                yield [exposed, *taken], [1.0, *taken.values()], -_SCALE * getattr(copy, way) / self.all_ms

    def run(self, budget: float, relaxed: bool) -> tuple[Sequence[float] | None, float]:
        """(value of each column, bound in ms); None where nothing fits."""
        waits = list(self.waits()) if self.links else []
        count = len(self._columns)
        exposed = [self.column("exposed", way) for way in ("left", "due")] if waits else []
        share = {column: _SCALE * size / self.all_bytes for column, size in self.bytes.items()}
        cost = np.zeros(count)
        for column, ms in self.time.items():
            cost[column] += 0.0 if self.fewest else _SCALE * ms / self.all_ms
        for column, size in share.items():
            cost[column] += size if self.fewest else _TIE * size
        for each in {} if self.fewest else self.links:  # of equal times, what is saved is not sent
            cost[self.column("sent", self.saves(each))] += 2 * _TIE * _SCALE * each.bytes / self.all_bytes
        cost[exposed] = 0.0 if self.fewest else 1.0
        lp = highspy.HighsLp()
        entries = [(list(needed) + [by] * (by >= 0), [1.0] * len(needed) + [-1.0] * (by >= 0), 1.0 if by < 0 else 0.0)
                   for needed, by in self.rows]
        entries.append(([*share], [-size for size in share.values()], -_SCALE * budget / self.all_bytes))
        for columns, values, least in waits:  # a slow link's coefficients would be lost in the tolerance
            largest = max(map(abs, values))
            entries.append((columns, [value / largest for value in values], least / largest))
        lp.num_col_, lp.num_row_ = count, len(entries)
        lp.col_cost_ = cost
        lp.col_lower_ = np.zeros(count)
        upper = np.array([float(column not in self.zero) for column in range(count)])
        upper[exposed] = highspy.kHighsInf
        lp.col_upper_ = upper
        lp.row_lower_ = np.array([least for _, _, least in entries])
        lp.row_upper_ = np.full(len(entries), highspy.kHighsInf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(columns) for columns, _, _ in entries)])
        lp.a_matrix_.index_ = np.array([column for columns, _, _ in entries for column in columns])
        lp.a_matrix_.value_ = np.array([value for _, values, _ in entries for value in values])
        if not relaxed:
            whole, part = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
            lp.integrality_ = [part if column in exposed else whole for column in range(count)]
        return self._solved(lp)

    def _solved(self, lp: highspy.HighsLp) -> tuple[Sequence[float] | None, float]:
        highs = highspy.Highs()
        highs.silent()
        for name, value in (("time_limit", _SECONDS), ("threads", 1), ("random_seed", 0),
                            ("mip_feasibility_tolerance", 1e-9), ("primal_feasibility_tolerance", 1e-9)):
            highs.setOptionValue(name, value)
        highs.passModel(lp)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None, 0.0
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise WorkbenchError(f"memory_budget: HiGHS found no choice in {_SECONDS:.0f} s "
                                 f"({highs.modelStatusToString(status)}): give a larger budget")
        reached = info.mip_dual_bound if lp.integrality_ else info.objective_function_value
        bound = 0.0 if self.fewest else max(0.0, reached / _SCALE - _TIE * (2 if self.links else 1)) * self.all_ms
        return highs.getSolution().col_value, bound
