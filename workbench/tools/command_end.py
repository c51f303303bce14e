"""The end of a command: its status, an error as one sentence, nothing that a user's file or a child left."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError, full_disk, no_exit
from workbench.recipe.files import print_result, write_whole
from workbench.recipe.strict_toml import DeclarationError

if TYPE_CHECKING:
    from workbench.pipeline.report import Report

PASSED, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
FIRST_RANK_SECONDS = 3.0
END_SECONDS = 2.0
"""How long threads and processes that a user's file left may go on once the command is done."""


def status_of(command: Callable[[], int]) -> int:
    """Run a command: its exit status. An error is printed on stderr, as one sentence."""
    try:
        try:
            with no_exit():
                return command()
        finally:
            sys.stdout.flush()  # now: at the interpreter's end an error here could not be told
    except WorkbenchError as error:
        return _print_error(error)
    except OSError as error:
        return _print_error_of_system(error)
    except KeyboardInterrupt as error:
        print("workbench: interrupted", *getattr(error, "__notes__", ()), file=sys.stderr)
        return INTERRUPTED


def _print_error_of_system(error: OSError) -> int:
    """A file's error has its name; without one it is standard output's, which is then dropped."""
    if error.filename is not None:
        return _print_error(WorkbenchError(f"{error.filename}: {error.strerror}"))
    reader_left = isinstance(error, BrokenPipeError)  # as in `| head`
    if not reader_left and not full_disk(str(error)):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not reader_left:
        print(
            f"workbench: error: standard output cannot be written: {error.strerror}",
            file=sys.stderr,
        )
    return FAILED


def _print_error(error: WorkbenchError) -> int:
    """Print the message on stderr, without a traceback; a rank's WorkbenchError in its own words."""
    message, status = str(error), FAILED if getattr(error, "failed_run", False) else BAD_INPUT
    if hasattr(error, "remote_traceback"):
        status = FAILED
        ours = re.match(r"workbench\.[\w.]*Error: ", error.summary)  # type: ignore[attr-defined]
        if ours:
            message = f"rank {error.rank}: {error.summary[ours.end() :]}"  # type: ignore[attr-defined]
    if not first_rank():  # torchrun ends this rank once rank 0 has printed and exited
        time.sleep(FIRST_RANK_SECONDS)
        message = f"rank {os.environ['RANK']}: {message}"
    for line in message.splitlines() if isinstance(error, DeclarationError) else [message]:
        print(f"workbench: error: {line}", file=sys.stderr)
    return status


def first_rank() -> bool:
    """Whether this is rank 0, or no rank: a finding of all of torchrun's ranks is printed once."""
    return os.environ.get("RANK", "0") == "0"


def tell_report(report: Report, args: argparse.Namespace) -> int:
    """Print a run's report on rank 0, and write the files `args.json` and `args.html`.

    Returns the exit status of every rank.
    """
    status = PASSED if report.ok else FAILED
    if not first_rank():
        return status
    report = replace(report, command=shlex.join(["workbench", *args.line]))
    print_result(lambda: report.table(color=colored(sys.stdout)), args.json, report.to_json)
    if args.html is not None:
        write_whole(args.html, report.page())
    kind = "error" if report.recipe.strict else "warning"
    for name, why in report.idle:
        print(f"workbench: {kind}: pass {name!r} had no effect: {why}", file=sys.stderr)
    return status


def colored(stream: Any) -> bool:
    """Whether a terminal shows colours that the user wants."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def run_program(main: Callable[[], int]) -> int:
    """Run the whole program: its exit status, with which the process ends within END_SECONDS.

    Python itself would wait for each thread and each process of `multiprocessing` that a user's
    file left. The children that are still there at the end are killed; a child's own children are
    not found, unless it is a rank.
    """
    atexit.register(_kill_children)  # first, so that it runs last
    status = main()
    bound = threading.Timer(END_SECONDS, _end, (status,))
    bound.daemon = True
    bound.start()
    return status


def _end(status: int) -> None:
    _kill_children()
    os._exit(status)


def _kill_children() -> None:
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread or a child that has just ended
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
