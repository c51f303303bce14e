"""Report: what one run of a recipe did, proved and measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workbench.checks.verdicts import Outcome, Verdict, worst
from workbench.pipeline.report_data import Expectation, PassRow, ReportData
from workbench.pipeline.report_text import html, table
from workbench.pipeline.train import Training
from workbench.recipe.recipe import Recipe


@dataclass(frozen=True, repr=False)
class Report(ReportData):
    """What `run` returns. Shown as a table in a notebook, by `table()` as text, by `to_json()` as data."""

    def table(self, *, reasoned: bool = True, color: bool = False, width: int = 100) -> str:
        """The verdicts as text: a row a pass, a column a check, and, if `reasoned`, the reasons underneath."""
        return table(self, reasoned=reasoned, color=color, width=width)

    def _repr_html_(self) -> str:
        return html(self)


def gravest_rank(each: Sequence[Verdict]) -> Verdict:
    """One verdict for all ranks: rank 0's where they agree, otherwise the gravest, with its rank."""
    gravest = worst(each)
    if each[0].outcome is gravest:
        return each[0]
    rank = next(i for i, v in enumerate(each) if v.outcome is gravest)
    return replace(each[rank], message=f"rank {rank}: {each[rank].message}")


def merge_rows(ranks: Sequence[Sequence[PassRow]]) -> list[PassRow]:
    """The ranks' rows as one list; ranks ran the same passes, or the schedules would have differed."""
    merged = []
    for same in zip(*ranks, strict=True):
        columns: Iterable[tuple[Verdict, ...]] = zip(*(row.verdicts for row in same), strict=True)
        merged.append(replace(same[0], verdicts=[gravest_rank(v) for v in columns]))
    return merged


def check_expectations(
    recipe: Recipe, training: Training | None, saved_bytes: int
) -> list[Expectation]:
    """What the recipe expects beside the passes' contracts. The loss falls if the last fifth is below the first."""
    found = []
    if recipe.expect.loss_falls:
        if training is None:
            found.append(Expectation("loss_falls", Outcome.UNKNOWN, "a fake world trains nothing"))
        elif len(training.losses) < 2:
            found.append(
                Expectation(
                    "loss_falls", Outcome.UNKNOWN, "one step has no course: set training.steps to 2"
                )
            )
        else:
            part = max(1, len(training.losses) // 5)
            first, last = (
                statistics.fmean(x) for x in (training.losses[:part], training.losses[-part:])
            )
            outcome = Outcome.PASS if last < first else Outcome.FAIL
            found.append(Expectation("loss_falls", outcome, f"from {first:.4f} to {last:.4f}"))
    limit = recipe.expect.max_saved_bytes
    if limit is not None:
        outcome = Outcome.PASS if saved_bytes <= limit else Outcome.FAIL
        found.append(
            Expectation(
                "max_saved_bytes", outcome, f"{saved_bytes:,} bytes saved, at most {limit:,}"
            )
        )
    return found
