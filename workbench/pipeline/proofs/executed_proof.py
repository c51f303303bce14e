"""What a step really ran: names of operators on a CPU, of kernels on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.checks import effect
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome, Verdict
from workbench.passes.registry import find_pass
from workbench.pipeline.step_profile import profiled
from workbench.torch_api.devices.float8 import operators_run


def names_of(step: Callable[[], Any]) -> Counter[str]:
    """Run `step` on a CPU once, or on a GPU twice, the second time measured: what ran, with counts."""
    if torch.cuda.is_available():
        return Counter(event.name for event in profiled(step)[0])
    return operators_run(step)


def prove_executed(records: Sequence[PassRecord], step: Callable[[], Any], microbatches: int) -> None:
    """Hold the effect of each pass that can tell against one run of `step`; every rank calls it.

    step: leaves model and optimizer as they were. An effect that the run does not show is NO_EFFECT.
    """
    wanted = [(record, executed, known) for record in records
              if (executed := find_pass(record.name).executed) is not None
              and (known := record.verdict("effect")) is not None and known.outcome is Outcome.PASS]
    names = names_of(step) if wanted else Counter[str]()
    for record, executed, known in wanted:
        told = executed(known.evidence, names, microbatches)
        said = f"{told.reason}; {known.message}" if told.happened else told.reason
        record.verdicts[:] = [_held(v, effect.verdict(replace(told, reason=said)), known) for v in record.verdicts]


def _held(verdict: Verdict, told: Verdict, known: Verdict) -> Verdict:
    return replace(told, evidence=known.evidence | told.evidence) if verdict is known else verdict
