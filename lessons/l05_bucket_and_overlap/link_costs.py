"""Graders of "Bucket and overlap": the time of collectives, and the tokens that hide them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.graph.read.collectives import Collective
from workbench.graph.read.cost import DeviceSpec
from workbench.graph.read.simulated_run import StepTimeline
from workbench.notebook.lessons.grading import close
from workbench.recipe.files import write_whole
from workbench.torch_api.devices.profile import MeasuredSpec

PROBE = 2**25
"""Bytes of the gather that gives the bandwidth."""


def margin_ms(spec: MeasuredSpec, run: StepTimeline) -> float:
    """How far a simulated step may be off, by the median errors known of the machine's compute and exposure."""
    errors = spec.profile.errors if spec.profile else {}
    if not {"compute", "exposure"} <= errors.keys():
        raise WorkbenchError(f"{spec.name}: no step was measured beside a simulated one, so its error is unknown: take "
                             "h200x2")
    return errors["compute"] * run.compute_ms + errors["exposure"] * run.exposed_ms


def linked(spec: MeasuredSpec, gbps: float, folder: Path) -> str:
    """A file in `folder` of the same machine with another link, to be given as a device.

    gbps: 1e9 bytes/s of the payload of an all-gather over 2 ranks, without its latency, which stays. No error is known
    of such a machine.
    """
    assert spec.profile is not None
    latency = {(row.kind, row.ranks): spec.sending_ms(row.kind, row.ranks, 0) for row in spec.profile.collectives}
    if ("all_gather", 2) not in latency:
        raise WorkbenchError(f"{spec.name}: no all-gather of 2 ranks was measured: take h100x2 or h200x2")
    longer = PROBE / (spec.sending_ms("all_gather", 2, PROBE) - latency["all_gather", 2]) / 1e6 / gbps
    slower = tuple(row.model_copy(update={"ms": start + max(0.0, row.ms - start) * longer})
                   for row in spec.profile.collectives for start in [latency[row.kind, row.ranks]])
    path = folder / f"{spec.name}_{gbps:g}_gbps.json"
    write_whole(path, spec.profile.model_copy(update={"collectives": slower, "errors": {}}).to_json())
    return str(path)


def takes_twice(answer: Any, *, spec: DeviceSpec) -> tuple[float, str]:
    """Grades the bytes from which on an all-gather over 2 ranks takes twice its latency."""
    latency, ms = (spec.sending_ms("all_gather", 2, size) for size in (0, PROBE))
    truth = bisect.bisect(range(PROBE), 2 * latency, key=lambda size: spec.sending_ms("all_gather", 2, size))
    return _named(answer, truth, {"the bandwidth of a large message": latency / (ms - latency) * PROBE,
                                  "megabytes": truth / 1e6})


def saves(answer: Any, *, before: Iterable[Collective], after: Iterable[Collective],
          spec: DeviceSpec) -> tuple[float, str]:
    """Grades the milliseconds of communication that merging saves."""
    listed = [list(before), list(after)]
    total, gathers = (
        [sent_ms((c for c in each if c.kind == "all_gather" or not alone), spec) for each in listed]
        for alone in (False, True))
    truth = total[0] - total[1]
    return _named(answer, truth, {"microseconds": 1e3 * truth, "the time that is left": total[1],
                                  "the gathers alone": gathers[0] - gathers[1]}, within=0.1)


def hides(answer: Any, *, layer: Iterable[Collective], products_ms: float, tokens: int,
          spec: DeviceSpec, within: float) -> tuple[float, str]:
    """Grades the tokens for which products, `products_ms` for `tokens`, last as long as the layer's collectives.

    within: how far the answer may be off, such as the error of the simulated times. The message names two likely
    mistakes: products of the forward alone, and gathers alone.
    """
    listed = list(layer)
    truth = tokens * sent_ms(listed, spec) / products_ms
    gathers = sent_ms((c for c in listed if c.kind == "all_gather"), spec) / sent_ms(listed, spec)
    return _named(answer, truth, {"about three times the tokens": 3 * truth,
                                  "tokens for the gathers alone": gathers * truth}, within=within, near=0.1)


def _named(answer: Any, truth: float, mistakes: Mapping[str, float], *, within: float = 0.05,
           near: float = 0.02) -> tuple[float, str]:
    """Grades a number as right or wrong: a share of the truth would give it away. The message names a likely mistake.

    mistakes: by message, the number that it leads to.
    """
    score, message = close(answer, truth=truth, within=within)
    if score >= 1:
        return 1.0, message
    return 0.0, next((said for said, wrong in mistakes.items() if close(answer, truth=wrong, within=near)[0] >= 1),
                     message)


def sent_ms(found: Iterable[Collective], spec: DeviceSpec) -> float:
    """How long these collectives take one after another."""
    return sum(spec.sending_ms(c.kind, c.group_size, c.payload) for c in found)
