"""The choice of what is saved as an integer program, solved by HiGHS (highs.dev)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from workbench.errors import WorkbenchError
from workbench.graph.saving.values import Producer, Stored

_SECONDS = 20.0
_SCALE = 1e3  # of objective and budget, which HiGHS holds to an absolute tolerance
_TIE = 1e-6  # all bytes count like this share of all time, so that of equal times the fewest bytes win
Key = Callable[[Producer], Hashable]


@dataclass(frozen=True)
class Solution:
    """saved: owners of what is kept. repeated: the operators that run again. ms: what the step takes longer. bound_ms:
    no choice takes less.
    """

    saved: frozenset[Stored]
    repeated: frozenset[Producer]
    ms: float
    bytes: int
    bound_ms: float


def solve(producers: Sequence[Producer], budget: float, *, alike: Key | None = None, relaxed: bool = False,
          fewest: bool = False) -> Solution | None:
    """The choice that adds least time while the saved bytes are at most `budget`; None where no choice fits.

    alike: producers of one key are treated alike. relaxed: with fractions, where only the bound counts. fewest: the
    fewest bytes instead, whatever they cost.

    A tensor that is needed is saved, or its producer repeated, and a repeated producer needs its inputs.
    """
    table = _Table(producers, alike or (lambda each: each), fewest)
    values, bound = table.run(budget, relaxed)
    if values is None:
        return None
    saved, repeated = set[Stored](), set[Producer]()
    todo = [each for made in producers for each in made.results if each.read]
    done = set(todo)
    while todo:  # only what the backward needs, whatever the solver set beside it
        each = todo.pop()
        made = each.producer
        if values[table.repeats(made)] < 0.5:
            saved.add(each)
            continue
        repeated.add(made)
        fresh = [given for given in made.inputs if given not in done]
        done.update(fresh)
        todo += fresh
    ms = sum(made.ms for made in repeated if not made.decided)
    return Solution(frozenset(saved), frozenset(repeated), ms, sum(each.bytes for each in saved), bound)


class _Table:
    """Columns: whether each tensor is saved, and whether each producer is repeated; those of one class share one."""

    def __init__(self, producers: Sequence[Producer], key: Key, fewest: bool):
        self._key = key
        self._columns: dict[Hashable, int] = {}
        self.time, self.bytes = defaultdict[int, float](float), defaultdict[int, int](int)
        self.zero = set[int]()
        rows: set[tuple[tuple[int, ...], int]] = set()
        for made in producers:
            again = self.repeats(made)
            self.time[again] += 0.0 if made.decided else made.ms
            if made.fixed == "saved":
                self.zero.add(again)
            if made.fixed == "repeated":  # if the backward needs it at all
                self.zero |= {self.saves(each) for each in made.results}
            rows |= {((again, self.saves(each)), -1) for each in made.results if each.read}
            rows |= {((self.repeats(each.producer), self.saves(each)), again) for each in made.inputs}
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

    def run(self, budget: float, relaxed: bool) -> tuple[Sequence[float] | None, float]:
        """(value of each column, bound in ms); None where nothing fits."""
        count = len(self._columns)
        share = {column: _SCALE * size / self.all_bytes for column, size in self.bytes.items()}
        cost = np.zeros(count)
        for column, ms in self.time.items():
            cost[column] += 0.0 if self.fewest else _SCALE * ms / self.all_ms
        for column, size in share.items():
            cost[column] += size if self.fewest else _TIE * size
        lp = highspy.HighsLp()
        entries = [(list(needed) + [by] * (by >= 0), [1.0] * len(needed) + [-1.0] * (by >= 0), 1.0 if by < 0 else 0.0)
                   for needed, by in self.rows]
        entries.append(([*share], [-size for size in share.values()], -_SCALE * budget / self.all_bytes))
        lp.num_col_, lp.num_row_ = count, len(entries)
        lp.col_cost_ = cost
        lp.col_lower_ = np.zeros(count)
        lp.col_upper_ = np.array([float(column not in self.zero) for column in range(count)])
        lp.row_lower_ = np.array([least for _, _, least in entries])
        lp.row_upper_ = np.full(len(entries), highspy.kHighsInf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(columns) for columns, _, _ in entries)])
        lp.a_matrix_.index_ = np.array([column for columns, _, _ in entries for column in columns])
        lp.a_matrix_.value_ = np.array([value for _, values, _ in entries for value in values])
        if not relaxed:
            lp.integrality_ = [highspy.HighsVarType.kInteger] * count
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
        bound = 0.0 if self.fewest else max(0.0, reached / _SCALE - _TIE) * self.all_ms
        return highs.getSolution().col_value, bound
