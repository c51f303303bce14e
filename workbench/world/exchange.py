"""One call: send it to the ranks, collect their answers, and turn any failure into a RankError, cause first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import (
    Failure,
    RankError,
    cause,
    exit_text,
    note_interrupt,
    ranks_text,
    waiting,
    with_source,
    without_fingerprints,
)
from workbench.world.divergence import Divergence, first_divergence
from workbench.world.rank_processes import RankProcesses

GRACE_SECONDS = 1.0
"""After the first failure, how long the other ranks may take to report theirs."""
LOOK_SECONDS = 10.0
"""How long a rank may take to report what it launched."""
TICK_SECONDS = 0.5


def gather(
    processes: RankProcesses, seconds: float, message: tuple[Any, ...] | None, ranks: Sequence[int]
) -> dict[int, bytes]:
    """Send `message` (None: the ranks are starting) to `ranks` and wait until each has answered.

    `processes.tick` is called twice a second meanwhile. Raises RankError unless each rank answers in time; its `kept`
    tells whether the ranks can take the next call. If they cannot, and on any other exception, the caller must kill
    them: the next call must not receive answers to this one.
    """
    processes.bound(max(seconds, 1.0))
    answers: dict[int, bytes] = {}
    failures: dict[int, Failure] = {}
    start = time.monotonic()
    limit, ticked = start + seconds, start
    try:
        if message is not None:
            processes.send(message, ranks)
        while len(answers) + len(failures) < len(ranks) and (left := limit - time.monotonic()) > 0:
            for rank, kind, body in processes.events(
                min(left, TICK_SECONDS) if processes.tick else left
            ):
                if kind in ("ok", "ready") and rank in ranks:
                    answers[rank] = body
                    continue
                answers.pop(rank, None)
                failures.setdefault(rank, _failure(processes, rank, kind, body))
                if kind != "unsent":
                    limit = min(limit, time.monotonic() + GRACE_SECONDS)
            if processes.tick and time.monotonic() > ticked + TICK_SECONDS:
                processes.tick(processes)
                ticked = time.monotonic()
        processes.drain()
    except KeyboardInterrupt as error:
        late = [rank for rank in ranks if rank not in answers]
        note_interrupt(error, _waiting(processes.stacks(late), late))
        raise
    finally:
        processes.echo.finish()
    if len(answers) < len(ranks):
        _fail(processes, answers, failures, ranks, f"{seconds:g} s", message is None)
    return answers


def _fail(
    processes: RankProcesses,
    answers: Mapping[int, bytes],
    failures: dict[int, Failure],
    ranks: Sequence[int],
    limit: str,
    starting: bool,
) -> NoReturn:
    late = [rank for rank in ranks if rank not in answers and rank not in failures]
    timed_out = all(
        failure.kind in ("waiting", "unsent") for failure in failures.values()
    ) and bool(late)
    unsent = not late and all(failure.kind == "unsent" for failure in failures.values())
    same = (
        len(failures) == len(ranks) and len({(f.kind, f.summary) for f in failures.values()}) == 1
    )
    if same:  # the times say nothing: show the lowest rank's
        failures = {rank: replace(failure, when=0.0) for rank, failure in failures.items()}
    stacks = processes.stacks(late)
    everyone = [*failures.values(), *_waiting(stacks, late)]
    first = cause(everyone)
    notes = []
    if timed_out:
        state = "did not start" if starting else "gave no answer"
        headline = f"{ranks_text(late)} {state} within {limit}."
        if answers:
            headline += f" ({ranks_text(list(answers))} {'did' if starting else 'had returned'}.)"
    else:
        headline = f"rank {first.rank} {_verb(first.kind, starting)}: {first.summary}"
    if not processes.folder.exists():
        notes.append(
            f"{processes.folder}, through which new process groups find each other, was removed while the "
            "ranks ran"
        )
    divergence, all_answered, launches = (
        (None, False, {}) if starting or unsent else compared(processes)
    )
    if launches and (silent := [rank for rank in late if rank not in launches]):
        notes.append(f"what {ranks_text(silent)} launched is not known: no answer")
    same = same and first.kind == "error" and "CUDA" not in first.summary
    kept = unsent or (same and all_answered and divergence is None)
    if divergence is not None and not same:
        notes.append(str(divergence))
    if first.rank in processes.launches and divergence is not None and not divergence.missing:
        odd = divergence.odd_one()
        others = ranks_text([rank for rank in divergence.launched if rank != odd])
        problem = (
            f"launched another collective than {others}, and the backend ended rank {first.rank} for it: launch "
            "the same collectives on all ranks, in the same order"
        )
        headline = f"rank {odd} {problem}."
        everyone.append(Failure(odd, "error", problem))
    if first.kind == "died" and any(
        "EnforceNotMet" in line for line in processes.echo.tail[first.rank]
    ):
        notes.append(
            "gloo ends a rank whose peer sends another size than it expects: run it again with check=True "
            "(%%ranks --check), and torch names the operators and shapes."
        )
    shown = {late[0]} if timed_out and starting else {first.rank} if first.kind == "died" else set()
    for rank in shown:
        if last := processes.echo.tail[rank]:
            notes.append("\n".join([f"rank {rank}, last output:", *(f"  {line}" for line in last)]))
    raise RankError(headline, everyone, timed_out, notes, kept, launches) from None


def compared(
    processes: RankProcesses, seconds: float = LOOK_SECONDS, detail: str = "lines"
) -> tuple[Divergence | None, bool, dict[int, list[Launch]]]:
    """The first collective on which the ranks differ, whether all reported in time, and their launches.

    detail: with source "lines", or "all" without, which takes a tenth of the time.
    """
    everyone = range(processes.size)
    processes.ask(everyone, "look", detail)
    answers = processes.answers(everyone, seconds)
    launches = processes.launches | {
        rank: look["launches"] for rank, look in answers.items() if look
    }
    return first_divergence(launches), len(launches) == processes.size, launches


def _waiting(stacks: Mapping[int, Sequence[str]], late: Sequence[int]) -> list[Failure]:
    now = time.monotonic()
    return [waiting(rank, stacks.get(rank, []), now) for rank in late]


def _failure(processes: RankProcesses, rank: int, kind: str, body: Any) -> Failure:
    now = time.monotonic()
    if kind == "died":
        stack = with_source("\n".join(processes.stacks([rank], ask=False).get(rank, [])))
        summary = exit_text(body) if body is not None else "the process closed its channel"
        return Failure(rank, "died", summary, stack, now)
    if kind == "stuck":
        return Failure(rank, "waiting", body, "", now)
    summary, trace = without_fingerprints(body["summary"]), without_fingerprints(body["traceback"])
    return Failure(rank, kind, summary, with_source(trace), now)


def _verb(kind: str, starting: bool) -> str:
    if starting:
        return "did not start"
    return {
        "died": "died",
        "load": "could not load the function or an argument",
        "unsent": "could not send its result",
    }.get(kind, "failed")
