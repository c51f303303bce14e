"""`%%ranks` in a real Jupyter kernel: what is left when it is interrupted, and restarted in mid-cell."""

import os
import re
import sys
import time

import pytest
from jupyter_client.manager import start_new_kernel
from processes import SOON, alive, wait_until_gone

pytestmark = [pytest.mark.ranks, pytest.mark.nightly]

HANG = """%%ranks
import time
from pathlib import Path
Path({folder!r}, str(dist.get_rank())).touch()
while dist.get_rank() == 1:
    pass
dist.barrier()"""


class Notebook:
    """A kernel with two ranks."""

    def __init__(self):
        path = os.pathsep.join(filter(None, sys.path))
        self.manager, self.client = start_new_kernel(env={**os.environ, "PYTHONPATH": path})

    def run(self, source):
        """What a cell shows."""
        shown = []

        def note(message):
            data = message["content"].get("data", {})
            shown.append(data.get("text/plain", ""))

        self.client.execute_interactive(source, timeout=60, output_hook=note)
        return "\n".join(shown)

    def start(self):
        """The pids of new ranks, which work."""
        self.run("%load_ext workbench")
        self.run("%%ranks -n 2 --backend gloo\nimport os, torch, torch.distributed as dist")
        summed = self.run("%%ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item(), os.getpid()")
        pids = [int(pid) for pid in re.findall(r"\(2.0, (\d+)\)", summed)]
        assert len(pids) == 2 and all(map(alive, pids))
        return pids

    def hang(self, folder):
        """Begins a cell that never ends: one rank computes, and the other waits for it."""
        self.client.execute(HANG.format(folder=str(folder)))
        limit = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < limit:
            time.sleep(0.05)


@pytest.fixture
def book():
    made = Notebook()
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("how", ["interrupt", "restart"])
def test_the_ranks_of_a_cell_that_hangs_end_with_it(book, row, tmp_path, how):
    pids = book.start()
    book.hang(tmp_path)
    start = time.monotonic()
    if how == "interrupt":
        book.manager.interrupt_kernel()
    else:
        book.manager.restart_kernel(now=False)
    left = wait_until_gone(pids)
    seconds = time.monotonic() - start
    assert seconds < SOON
    book.client.wait_for_ready(timeout=60)
    row("2 gloo", f"{how} of the kernel", seconds, left, not set(pids) & set(book.start()))
