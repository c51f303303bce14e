"""What a step really ran: names of operators on a CPU, of kernels on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from workbench.checks.verdicts import Outcome
from workbench.graph.facts import Known
from workbench.pipeline.step_profile import profiled
from workbench.torch_api.devices.float8 import operators_run
from workbench.world.mesh import all_gather_object


def note_executed(known: Known, step: Callable[[], Any]) -> None:
    """Note what `step` runs, where a pass can tell its effect by that; every rank calls it.

    step: leaves model and optimizer as they were. On a GPU it runs twice.
    """
    effects = [
        record.verdict("effect") for record in known.records if record.item.executed is not None
    ]
    asked = any(effect is not None and effect.outcome is Outcome.PASS for effect in effects)
    if any(all_gather_object(asked)):  # local shapes may differ, and a step has collectives
        on_gpu = torch.cuda.is_available()
        known.ran = (
            Counter(kernel.name for kernel in profiled(step)[0]) if on_gpu else operators_run(step)
        )
