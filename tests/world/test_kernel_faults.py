"""`%%ranks` in real Jupyter kernels: what is left when a kernel is interrupted, restarted or shut down."""

import os
import re
import sys
import time

import pytest
from jupyter_client.manager import start_new_kernel
from processes import SOON, alive, wait_until_gone

pytestmark = pytest.mark.ranks
N = 2


class Notebook:
    """A kernel, and cells that it runs."""

    def __init__(self):
        path = os.pathsep.join(filter(None, sys.path))
        self.manager, self.client = start_new_kernel(kernel_name="python3", env={**os.environ, "PYTHONPATH": path})
        self.pids = self.start()

    def start(self):
        """Starts the ranks; their pids."""
        self.run("%load_ext workbench")
        self.run(f"%%ranks -n {N} --backend gloo\nimport os, time, torch, torch.distributed as dist")
        shown = self.run("%%ranks\nos.getpid()")
        return [int(pid) for pid in re.findall(r"^rank \d+: (\d+)$", shown, re.MULTILINE)]

    def send(self, source):
        """Begins a cell, and returns its message id."""
        return self.client.execute(source)

    def read(self, message, seconds=60):
        """What a cell has shown when it ends: text of outputs and errors."""
        shown, limit = [], time.monotonic() + seconds
        while time.monotonic() < limit:
            got = self.client.get_iopub_msg(timeout=max(0.1, limit - time.monotonic()))
            if got["parent_header"].get("msg_id") != message:
                continue
            content = got["content"]
            if got["msg_type"] == "status" and content["execution_state"] == "idle":
                return "\n".join(shown)
            shown += [content.get("text", ""), content.get("data", {}).get("text/plain", ""),
                      *content.get("traceback", ())]
        raise TimeoutError("the cell did not end")

    def run(self, source):
        return self.read(self.send(source))

    def works(self):
        """Whether a cell on all ranks does."""
        self.run("%%ranks\nimport os, time, torch, torch.distributed as dist")
        shown = self.run("%%ranks\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()")
        return shown.strip().endswith(f": {float(N)}")

    def hang(self):
        """Begins a cell that never ends: one rank computes, and the others wait for it."""
        message = self.send("%%ranks\nprint('begun')\nwhile dist.get_rank() == 1:\n    pass\ndist.barrier()")
        begun, limit = 0, time.monotonic() + 30
        while begun < N and time.monotonic() < limit:
            got = self.client.get_iopub_msg(timeout=30)
            begun += str(got["content"].get("text", "")).count("begun")
        return message

    def close(self):
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook():
    made = []

    def make():
        made.append(Notebook())
        assert len(made[-1].pids) == N and all(map(alive, made[-1].pids))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.nightly
def test_interrupts_of_the_kernel_twice_in_a_row(notebook, row):
    book = notebook()
    for turn in range(2):
        hanging, pids, start = book.hang(), book.pids, time.monotonic()
        book.manager.interrupt_kernel()
        shown = book.read(hanging)
        seconds = time.monotonic() - start
        left = wait_until_gone(pids, 0)
        assert "KeyboardInterrupt: the ranks were ended." in shown and "rank 1: busy in <module>" in shown
        assert seconds < SOON
        row(f"{N} gloo", f"interrupt of the kernel, number {turn + 1}", seconds, left, book.works())
        book.pids = book.start()


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["restart", "shutdown"])
def test_the_end_of_the_kernel(notebook, row, how):
    book = notebook()
    book.hang()
    start = time.monotonic()
    if how == "shutdown":
        book.manager.shutdown_kernel()
    else:
        book.manager.restart_kernel(now=False)
    left = wait_until_gone(book.pids, 10)
    row(f"{N} gloo", f"{how} of the kernel", time.monotonic() - start, left, notebook().works())
