"""`%%ranks` in a shell of this process: what it shows, completes, refuses and leaves."""

import linecache
import re
import threading
from unittest import mock

import pytest
import torch
from IPython.core.completer import CompletionContext
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from workbench.notebook.draw.picture import Table
from workbench.notebook.draw.rank_values import RankValues
from workbench.world.cells import SHOWN, compiled
from workbench.world.ranks import RankError

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def shell():
    made = InteractiveShell()
    made.run_cell("%load_ext workbench")
    yield made
    made.run_cell("%unload_ext workbench")


@pytest.fixture
def cell(shell):
    """Runs a cell: (value, what was printed, error)."""

    def run(source):
        with capture_output(display=False) as printed:
            done = shell.run_cell(source, store_history=True)
        return done.result, printed.stdout + printed.stderr, done.error_in_exec

    run("%%ranks -n 2 --backend gloo\nimport torch, torch.distributed as dist\nrank = dist.get_rank()")
    return run


def magics(shell):
    return shell.magics_manager.registry["RanksMagics"]


def test_one_namespace_from_cell_to_cell_and_the_last_expression(cell):
    assert cell("%%ranks\nmodel = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)")[0] is None
    value, _, _ = cell("%%ranks\nmodel.weight.fill_(rank)\nmodel(torch.ones(2))")
    assert isinstance(value, RankValues) and torch.equal(value[1], torch.tensor([2.0, 2.0])) and not value.agree
    assert cell("%%ranks\nrank;")[0] is None
    shown = repr(cell("%%ranks\nimport threading\nthreading.Lock()")[0])  # which cannot be sent
    assert shown == "ranks 0, 1: <unlocked _thread.lock object>"


def test_a_dtensor_comes_as_the_shards_that_it_is(cell):
    value, _, _ = cell("""%%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
{"d": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]), "mesh": mesh}""")
    assert value[1]["d"].shape == (4,) and value[1]["d"].placements == ("S(0)",)
    assert torch.equal(value[1]["d"].local, torch.tensor([2.0, 3.0]))
    assert "['d'] differs" in repr(value) and "1 of 2 entries agree" in repr(value)


def test_names_are_sent_and_brought_back_and_the_backend_named_again(cell, shell):
    pids = magics(shell).pool.pids
    shell.user_ns["steps"] = 7
    value, _, _ = cell("%%ranks --only 1 --send steps --backend auto\nsteps + rank")
    assert list(value) == [8] and value.ranks == (1,)
    cell("%%ranks --bring found,rank\nfound = [torch.ones(2) * (rank + 1)]")
    assert torch.equal(shell.user_ns["found"][0], torch.ones(2)) and shell.user_ns["rank"] == 0
    cell("%%ranks --only 1 --bring found\nNone")
    assert torch.equal(shell.user_ns["found"][0], torch.ones(2) * 2)
    _, printed, _ = cell("%%ranks --backend gloo --bring nowhere\nNone")
    assert "UsageError: %%ranks --bring nowhere: rank 0 has no such name" in printed
    assert magics(shell).pool.pids == pids


def test_a_cell_that_is_meant_to_fail(cell):
    _, printed, error = cell("%%ranks --fails\nnothing")
    assert error is None and printed.startswith("RankError: rank 0 failed: NameError")
    assert "the cell was meant to fail, and every rank came to its end" in cell("%%ranks --fails\n1")[1]


def test_the_same_error_everywhere_keeps_the_ranks_and_shows_the_cells_line(cell, shell):
    pids = magics(shell).pool.pids
    _, _, error = cell("%%ranks\nkept = 5\n\nnothing.there")
    assert isinstance(error, RankError) and error.kept
    assert str(error).count("Traceback") == 1
    shown = "\n".join(error._render_traceback_())
    assert re.search(r'File "cell \d+", line 4, in <module>\n    nothing.there', shown)
    assert shown.endswith("The ranks live on, with all they hold.") and "run_cell" not in shown
    assert repr(cell("%%ranks\nkept")[0]) == "ranks 0, 1: 5" and magics(shell).pool.pids == pids


def test_an_error_on_one_rank_ends_them_and_the_next_cell_works(cell):
    _, _, error = cell("%%ranks\nif rank == 1:\n    raise ValueError('boom')\ndist.barrier()")
    assert error.headline == "rank 1 failed: ValueError: boom"
    shown = "\n".join(error._render_traceback_())
    assert "rank 0: waiting in the collective barrier, called from <module> (cell" in shown
    assert shown.endswith("The ranks were ended, with all they held: the next %%ranks starts new ones.")
    assert "NameError: name 'rank' is not defined" in str(cell("%%ranks\nrank")[2])


BAD = [
    ("%%ranks\ndef f(x:\n    pass", "SyntaxError: '(' was never closed"),
    ("%%ranks\n!ls", "Magics and shell commands do not work on the ranks: only Python does."),
    ("%%ranks --only 5\n1", "UsageError: %%ranks --only: the ranks are 0 to 1"),
    ("%%ranks --only a\n1", "UsageError: argument --only: invalid"),
    ("%%ranks --send nowhere\n1", "UsageError: %%ranks --send nowhere: the notebook has no such name"),
    ("%%ranks --send lock\n1", "UsageError: the function or an argument cannot be sent to the ranks: TypeError"),
    ("%%ranks -n 0\n1", "n must be a whole number, 1 or more"),
    ("%%ranks status\n1", "UsageError: %ranks takes one of status, restart, stop and no cell"),
]


def test_bad_input_is_one_message_and_the_ranks_live_on(cell, shell):
    shell.user_ns["lock"] = threading.Lock()
    pids = magics(shell).pool.pids
    for source, message in BAD:
        _, printed, error = cell(source)
        assert message in printed + str(error) and "Traceback" not in printed
        assert magics(shell).pool.pids == pids


def test_completion_knows_the_names_of_the_ranks(cell, shell):
    cell("%%ranks\nonly_on_ranks = torch.ones(1)")

    def complete(token, text):
        found = magics(shell).complete(CompletionContext(token, text, len(token), 1, None))
        return [completion.text for completion in found["completions"]]

    assert complete("only_on", "%%ranks\nonly_on") == ["only_on_ranks"]
    assert "only_on_ranks.numpy" in complete("only_on_ranks.num", "%%ranks\nonly_on_ranks.num")
    assert complete("only_on", "only_on") == []


def test_the_cell_after_an_interrupt_says_that_its_ranks_are_new(cell, shell, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(magics(shell).pool, "run_on", mock.Mock(side_effect=KeyboardInterrupt))
        cell("%%ranks\n1")
    said = "The ranks are new: the interrupt ended those before, with all they held.\n"
    assert [cell("%%ranks\n1;")[1].count(said) for _ in range(2)] == [1, 0]


def test_status_other_ranks_checks_restart_and_stop(cell, shell):
    cell("%%ranks\ndist.barrier()")
    table, _, _ = cell("%ranks status")
    assert isinstance(table, Table) and [row[0] for row in table.rows] == [0, 1]
    assert [row[2] for row in table.rows] == ["idle", "idle"] and "barrier, number" in table.rows[0][5]
    value, printed, _ = cell("%%ranks -n 3 --check\nimport torch.distributed as dist\ndist.get_world_size()")
    assert printed.startswith("2 ranks ended, with all they held: 3 new ones start, with checks.\n")
    assert repr(value) == "ranks 0, 1, 2: 3"
    cell("%ranks restart")
    assert cell("%ranks status")[1] == "no ranks run: a cell that begins with %%ranks starts them\n"
    cell("%ranks stop")
    assert magics(shell).pool is None


def test_old_cells_leave_nothing_in_the_cache_of_lines():
    names = [f"a test's cell {i}" for i in range(SHOWN + 2)]
    for name in names:
        compiled("1 / 0", name)
    assert [name in linecache.cache for name in names] == [False, False, *[True] * SHOWN]
