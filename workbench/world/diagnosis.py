"""`RankError`: what failed on the ranks, cause first. Also parses the stacks that faulthandler writes."""

from __future__ import annotations

import linecache
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from workbench.errors import WorkbenchError, is_library, shown_file
from workbench.recipe.wording import counted
from workbench.torch_api.distributed.flight_recorder import Launch

MAX_FRAMES = 20
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.*)$')
_WORKER_FILES = ('/workbench/world/worker.py"', '/workbench/world/cells.py"')
_COLLECTIVE_FILES = ("/distributed/distributed_c10d.py", "/distributed/_functional_collectives.py")
# Those files also define functions that wait for nobody, such as get_rank.
_COLLECTIVES = ("all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "monitored_barrier", "new_group",
                "recv", "reduce", "scatter", "send", "wait")
# The errors of a rank whose peer left a collective: usually a consequence, not the cause.
_BROKEN_PEER = re.compile(
    r"DistBackendError|DistNetworkError|Connection (closed|reset|refused)|Broken pipe|gloo|NCCL|aborted",
    re.IGNORECASE,
)

_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=\d+, OpType=(\w+)"
    r"(?:, TensorShape=\[([^]]*)\], TensorDtypes=(\w+))?"
)
_MISMATCH = re.compile(r"Detected mismatch between collectives on ranks\..*")


@dataclass(frozen=True)
class Failure:
    """One rank's part in a failed call.

    `kind`: "error" (raised), "load" (the call could not be unpickled), "unsent" (the result could not be pickled),
    "died", or "waiting" (had not answered). `summary`: usually one line; `detail`: a traceback or a stack, as text.
    """

    rank: int
    kind: str
    summary: str
    detail: str = ""
    when: float = 0.0

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts the cause first: other errors by time, then broken connections, then waiting ranks."""
        broken = self.kind == "error" and _BROKEN_PEER.search(self.summary) is not None
        return (2 if self.kind == "waiting" else int(broken)), self.when, self.rank


class RankError(WorkbenchError):
    """A call failed on at least one rank. The text names the first failing rank and its cause first.

    `rank` is that rank, `summary` its cause, `remote_traceback` its traceback or stack as text, and `failures` holds
    all ranks' failures, the cause first. `timed_out`: no rank failed, but some did not answer in time. `kept`: the
    ranks still run, with all their objects; otherwise they were ended. `launches`: the collectives that each rank had
    launched, oldest first, of the ranks that could still tell.
    """

    def __init__(
        self,
        headline: str,
        failures: Iterable[Failure],
        timed_out: bool = False,
        notes: Sequence[str] = (),
        kept: bool = False,
        launches: Mapping[int, Sequence[Launch]] | None = None,
    ) -> None:
        self.failures = sorted(failures, key=lambda failure: failure.order)
        self.launches = dict(launches or {})
        first = self.failures[0]
        self.headline, self.timed_out, self.kept = headline, timed_out, kept
        self.rank, self.summary, self.remote_traceback = first.rank, first.summary, first.detail
        parts = [headline]
        parts += [
            f"  {text}"
            for text in _consequences(self.failures[0 if timed_out else 1 :], first, timed_out)
        ]
        parts += [f"\n{note}" for note in notes]
        super().__init__("\n".join(parts + _details(self.failures)))

    def _render_traceback_(self, *_: object) -> list[str]:
        """IPython shows these lines instead of the pool's own frames."""
        return "\n".join(
            [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]
        ).splitlines()


def note_interrupt(error: BaseException, waits: Sequence[Failure]) -> None:
    """Note on a KeyboardInterrupt where the ranks were. IPython shows the note instead of the pool's own frames."""
    lines = [
        "the ranks were ended.",
        *(f"rank {failure.rank}: {failure.summary}" for failure in waits),
    ]
    error.add_note("\n".join(lines))
    error._render_traceback_ = lambda *_: [f"KeyboardInterrupt: {lines[0]}", *lines[1:]]  # type: ignore[attr-defined]


def cause(failures: Sequence[Failure]) -> Failure:
    """The failure that probably caused the others, judged by kind and time."""
    return min(failures, key=lambda failure: failure.order)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`, `ranks 0 to 7, 12`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def by_text(texts: Iterable[tuple[int, str]]) -> list[str]:
    """`ranks 0, 2: TEXT`: a line for each different text, in the order of their first ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts:
        ranks.setdefault(text, []).append(rank)
    return [f"{ranks_text(same)}: {text}" for text, same in ranks.items()]


def _consequences(failures: Sequence[Failure], first: Failure, timed_out: bool) -> list[str]:
    def same(failure: Failure) -> bool:
        return not timed_out and (failure.kind, failure.summary) == (first.kind, first.summary)

    return by_text(
        (failure.rank, "the same" if same(failure) else failure.summary) for failure in failures
    )


def _details(failures: Sequence[Failure]) -> list[str]:
    """Each different traceback or stack once, with its ranks."""
    shared: dict[str, list[Failure]] = {}
    for failure in failures:
        if failure.detail:
            shared.setdefault(failure.detail, []).append(failure)
    parts = []
    for detail, owners in shared.items():
        of_a_live_rank = owners[0].kind in ("waiting", "died")
        title = "stack, innermost call first" if of_a_live_rank else "traceback"
        parts += ["", f"{ranks_text([owner.rank for owner in owners])}, {title}:", detail.rstrip()]
    return parts


def exit_text(status: int) -> str:
    """How a process ended, from its return code as in `subprocess`: negative for a signal."""
    if status >= 0:
        return f"the process exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"


def without_fingerprints(text: str) -> str:
    """Shorten the message of torch's detailed check: `... different collectives: rank 0 allreduce of float [3]`."""
    return _MISMATCH.sub(lambda match: "the ranks run different collectives: " + ", ".join(
        f"rank {rank} {op.lower()}" + (f" of {dtypes.lower()} [{shape}]" if shape is not None else "")
        for rank, op, shape, dtypes in _FINGERPRINT.findall(match[0])), text)


def with_source(text: str) -> str:
    """Add the source line to each frame that lacks one. Only the parent has the text of the cells."""
    lines, out = text.splitlines(), []
    for index, line in enumerate(lines):
        out.append(line)
        frame = _FRAME.match(line)
        if frame and not (index + 1 < len(lines) and lines[index + 1].startswith("    ")):
            source = source_line(frame["file"], int(frame["line"]))
            out += [f"    {source}"] if source else []
    return "\n".join(out)


def source_line(file: str, line: int) -> str:
    """That line's text, stripped; empty where it cannot be had."""
    return linecache.getline(file, line).strip()


def read_stack(text: str) -> list[str]:
    """The frames of the thread that runs the user's call, innermost first, from faulthandler's output.

    The worker's own frames are left out. Another thread is shown only if the main one is missing.
    """
    return min(_threads(text), key=lambda thread: not thread[0], default=(False, []))[1]


def stack_is_whole(text: str) -> bool:
    """Whether faulthandler has written the main thread down to the worker's own frames, or to its bound of frames."""
    return any(main for main, _ in _threads(text)) or "\n  ...\n" in text


def _threads(text: str) -> list[tuple[bool, list[str]]]:
    """Each thread, whether it is the main one, and its frames without the worker's."""
    threads = []
    for block in re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[1:]:
        frames = [line for line in block.splitlines() if _FRAME.match(line)]
        first_worker = next(
            (i for i, line in enumerate(frames) if any(file in line for file in _WORKER_FILES)),
            None,
        )
        if first_worker is None:
            threads.append((False, frames))
        elif not any(line.endswith(("in listen", "in report")) for line in frames[first_worker:]):
            # While the main thread joins the group or waits for a call, all its frames are ours: show those.
            threads.append((True, frames[:first_worker] or frames[first_worker : first_worker + 2]))
    return threads


def where(frames: Sequence[str]) -> str:
    """Where a rank is, in one line: the collective in which it waits, and the user's line."""
    matches = [match for match in map(_FRAME.match, frames) if match]
    if not matches:
        return "no answer, and no stack could be had"
    if _WORKER_FILES[0] in frames[0] and matches[0]["name"] == "serve":
        return "waiting for the call"
    collective = next((f["name"] for f in matches[:4] if f["file"].endswith(_COLLECTIVE_FILES)
                       and f["name"].startswith(_COLLECTIVES)), None)
    user = next((f for f in matches if not is_library(f["file"])), matches[0])
    place = f"{user['name']} ({file_name(user['file'])}, line {user['line']})"
    return (
        f"waiting in the collective {collective}, called from {place}"
        if collective
        else f"busy in {place}"
    )


def file_name(file: str) -> str:
    """A file's name without its folder; of a generated graph, without the place that generated it; a cell by number."""
    if file.startswith("<"):
        return file.split(" from ")[0]
    shown = shown_file(file)
    return os.path.basename(file) if shown == file else shown


def waiting(rank: int, frames: Sequence[str], now: float) -> Failure:
    """A rank that has not answered, with its stack."""
    shown = _folded(frames)
    if len(shown) > MAX_FRAMES:
        shown[MAX_FRAMES:] = [f"  ... {len(shown) - MAX_FRAMES} more"]
    summary = where(frames)
    # A rank outside any collective comes first: probably the others wait for it.
    order = now + 1.0 if summary.startswith("waiting") else now
    return Failure(rank, "waiting", summary, with_source("\n".join(shown)), order)


def _folded(frames: Sequence[str]) -> list[str]:
    """The frames; consecutive frames of one library become one line."""
    shown: list[str] = []
    for library, run in groupby(
        frames, key=lambda line: _library((_FRAME.match(line) or {"file": ""})["file"])
    ):
        lines = list(run)
        shown += [f"  ... {counted(len(lines), 'frame')} of {library}"] if library else lines
    return shown


def _library(file: str) -> str:
    """The package that a frame's file belongs to, or "Python"; empty for the user's code."""
    if not is_library(file):
        return ""
    *_, inside = re.split("/(?:site|dist)-packages/", file)
    return inside.split("/")[0].removesuffix(".py") if inside != file else "Python"
