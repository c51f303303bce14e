"""`%%ranks` and `%ranks` for IPython: cells that run on every rank, in a namespace that each rank keeps.

    %load_ext workbench

    %%ranks -n 4
    x = torch.ones(2) * dist.get_rank()
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from workbench.errors import WorkbenchError
from workbench.notebook.draw.picture import Table, table
from workbench.notebook.draw.rank_values import RankValues
from workbench.pipeline.progress import PROGRESS
from workbench.world.cells import compiled, fetch, run_cell
from workbench.world.diagnosis import RankError, ranks_text
from workbench.world.pool import RankPool, checked_timeout
from workbench.world.rank_output import ECHOES
from workbench.world.rank_processes import RankProcesses
from workbench.world.ranks import BACKENDS, ranks, resolve

DEFAULTS = (4, "auto", False)
"""Number of ranks, backend, and whether torch checks their collectives, until a cell changes them."""
COMMANDS = ("status", "restart", "stop")


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",")]


def _numbers(listed: str) -> list[int]:
    return sorted({int(rank) for rank in listed.split(",")})


@magics_class
class RanksMagics(Magics):
    """One pool for the notebook, started by its first `%%ranks`."""

    shell: InteractiveShell

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self.pool: RankPool | None = None
        self._asked = DEFAULTS
        self._interrupted = False

    @magic_arguments()
    @argument("command", nargs="?", choices=COMMANDS, help="without a cell: what to do with the ranks")
    @argument("-n", type=int, help=f"number of ranks; {DEFAULTS[0]} by default")
    @argument("--backend", choices=BACKENDS, help="auto takes nccl where there are enough GPUs, else gloo")
    @argument("--timeout", type=float, default=60.0, help="seconds that the cell may take; 60 by default")
    @argument("--only", type=_numbers, metavar="0,1", help="run on these ranks only")
    @argument("--echo", choices=ECHOES, default="live", help="the ranks' output as it arrives, or grouped by rank")
    @argument("--check", action="store_true", help="torch compares every collective between the ranks before it runs")
    @argument("--fails", action="store_true", help="the cell is meant to fail: print its report, raise nothing")
    @argument("--send", type=_names, default=(), metavar="a,b",
              help="copy these names of the notebook to the ranks first")
    @argument("--bring", type=_names, default=(), metavar="a,b",
              help="copy these names from the first of the ranks to the notebook afterwards")
    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> RankValues | Table | None:
        """Run a cell on every rank; `%ranks status`, `restart` and `stop` control the ranks themselves."""
        asked = parse_argstring(self.ranks, line)
        if (cell is None) != bool(asked.command):
            raise UsageError(f"%ranks takes one of {', '.join(COMMANDS)} and no cell, "
                             "%%ranks a cell and none of them")
        try:
            if cell is None:
                return self._command(asked.command)
            values = self._run(asked, cell)
        except RankError as error:
            error.add_note(
                "The ranks live on, with all they hold."
                if error.kept
                else "The ranks were ended, with all they held: the next %%ranks starts new ones."
            )
            if not asked.fails:
                raise
            print("\n".join(error._render_traceback_()))
            return None
        except WorkbenchError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        if asked.fails:
            raise UsageError(
                "%%ranks --fails: the cell was meant to fail, and every rank came to its end"
            )
        return values

    def _command(self, command: str) -> Table | None:
        if command == "status":
            if self.pool is not None and self.pool.pids:
                return status(self.pool)
            print("no ranks run: a cell that begins with %%ranks starts them")
        elif self.pool is not None:
            (self.pool.restart if command == "restart" else self.close)()
        return None

    def close(self) -> None:
        """End the ranks, and restore the defaults."""
        if self.pool is not None:
            self.pool.close()
        self.pool, self._asked = None, DEFAULTS

    def _run(self, asked: Any, cell: str) -> RankValues | None:
        name = f"cell {len(self.shell.user_ns['In']) - 1}"  # the prompt: execution_count is the next one
        _refuse_what_is_not_python(cell, name)
        sent = {name: self._named(name) for name in asked.send}
        pool = self._pool_for(asked)
        some = asked.only or list(range(pool.size))
        pool.timeout, pool.echo = asked.timeout, asked.echo
        watched = asked.echo == "live" and hasattr(self.shell, "kernel") and os.environ.get(PROGRESS) != "0"
        watch = Watch() if watched else None
        try:
            answers = pool.run_on(some, run_cell, (cell, name, sent), tick=watch)
        finally:
            if watch is not None:
                watch.close()
        pool.refuse_divergence()
        if asked.bring:
            self._bring(pool, some[0], asked.bring)
        values = [None if answer is None else pickle.loads(answer) for answer in answers]
        return None if all(value is None for value in values) else RankValues(some, values)

    def _pool_for(self, asked: Any) -> RankPool:
        """The pool that a cell asks for; a request that is refused ends no ranks."""
        n, backend, check = self._asked
        running = self.pool.backend if self.pool is not None else ""
        if asked.backend and not (running and asked.backend in ("auto", running)):
            backend = asked.backend
        wanted = (n if asked.n is None else asked.n, backend, check or asked.check)
        resolve(wanted[1], wanted[0])
        checked_timeout(asked.timeout)
        if not set(asked.only or ()) <= set(range(wanted[0])):
            raise UsageError(f"%%ranks --only: the ranks are 0 to {wanted[0] - 1}")
        if self.pool is not None and wanted != self._asked:
            ended = len(self.pool.pids)
            self.close()
            if ended:
                checks = ", with checks" if wanted[2] else ""
                started = f"{wanted[0]} new ones start{checks}"
                print(f"{ended} ranks ended, with all they held: {started}.")
        if self.pool is None:
            self.pool = ranks(wanted[0], backend=wanted[1], check=wanted[2])
        self._asked = wanted
        if self._interrupted:
            print("The ranks are new: the interrupt ended those before, with all they held.")
            self._interrupted = False
        return self.pool

    def _named(self, name: str) -> Any:
        if name not in self.shell.user_ns:
            raise UsageError(f"%%ranks --send {name}: the notebook has no such name")
        return self.shell.user_ns[name]

    def _bring(self, pool: RankPool, rank: int, wanted: list[str]) -> None:
        brought = pickle.loads(pool.run_on([rank], fetch, [wanted])[0])
        self.shell.push(brought)
        if missing := [name for name in wanted if name not in brought]:
            raise UsageError(f"%%ranks --bring {missing[0]}: rank {rank} has no such name")

    def complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """Names and attributes as rank 0 knows them, inside a cell that begins with `%%ranks`."""
        matches: list[str] = []
        on_ranks = context.full_text.lstrip().startswith("%%ranks")
        if self.pool is not None and on_ranks and context.token:
            matches = self.pool.ask([0], "complete", context.token).get(0) or []
        names = [match.rstrip("(") for match in matches]
        return {"completions": [SimpleCompletion(text=name, type="name") for name in names]}


class Watch:
    """A table of the ranks below a running cell, from its second tick on, removed when the cell ends."""

    def __init__(self) -> None:
        self._shown: Any = None
        self._ticks = 0

    def __call__(self, processes: RankProcesses) -> None:
        looks = processes.answers([], 0)
        processes.ask(range(processes.size), "look", "last")
        self._ticks += 1
        if self._ticks < 2:
            return
        table = _status_table(processes.size, processes.pids, looks, "runs the cell")
        page = {"text/html": table._repr_html_(), "text/plain": repr(table)}
        if self._shown is None:
            processes.echo.clear_bar()
            self._shown = display(page, raw=True, display_id=True)
        else:
            self._shown.update(page, raw=True)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.update({"text/html": "", "text/plain": ""}, raw=True)


def status(pool: RankPool) -> Table:
    """The ranks, one a row: state, memory and last collective."""
    state = "in a call" if pool.busy else "idle"
    return _status_table(pool.size, pool.pids, pool.ask(range(pool.size), "look", "last"), state)


def _status_table(
    size: int, pids: Sequence[int], looks: dict[int, dict[str, Any]], state: str
) -> Table:
    rows = []
    for rank in range(size):
        look = looks.get(rank)
        if look is None:
            rows.append((rank, str(pids[rank]), "no answer yet", "", "", ""))
            continue
        last = look["launches"][-1] if look["launches"] else None
        gpu = look["gpu_bytes"]
        rows.append((rank, str(pids[rank]), f"waits in {last.op}" if last and not last.done else state,
                     f"{look['host_bytes'] / 2**20:,.0f} MiB", "" if gpu is None else f"{gpu / 2**20:,.0f} MiB",
                     f"{last.op}, number {last.number} of {last.axis or 'a group'} ({ranks_text(last.ranks)})"
                     if last else "none yet"))
    return table(
        "the ranks", ("rank", "pid", "state", "memory", "GPU memory", "last collective"), rows
    )


def _refuse_what_is_not_python(cell: str, name: str) -> None:
    try:
        compiled(cell, name)
    except SyntaxError as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        if any(line.lstrip().startswith(("%", "!")) for line in cell.splitlines()):
            text += "\nMagics and shell commands do not work on the ranks: only Python does."
        raise UsageError(text) from None


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completions."""
    magics = RanksMagics(shell)
    shell.register_magics(magics)

    @context_matcher()
    def ranks_matcher(context: CompletionContext) -> SimpleMatcherResult:
        return magics.complete(context)

    shell.Completer.custom_matchers.append(ranks_matcher)
    _LOADED.append((magics, ranks_matcher))


_LOADED: list[tuple[RanksMagics, Any]] = []


def unload(shell: InteractiveShell) -> None:
    """End the ranks; `%%ranks` stays registered, and starts new ones."""
    while _LOADED:
        magics, matcher = _LOADED.pop()
        magics.close()
        shell.Completer.custom_matchers.remove(matcher)
