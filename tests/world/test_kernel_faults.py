"""`%%ranks` in real Jupyter kernels: what is left when a kernel is interrupted, restarted, shut down or killed."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
from jupyter_client.manager import start_new_kernel
from processes import SOON, alive, wait_until_gone

pytestmark = pytest.mark.ranks
GROUPS = [
    pytest.param("gloo", 2, id="2 gloo"),
    pytest.param("gloo", 4, id="4 gloo", marks=pytest.mark.nightly),
    pytest.param("nccl", 2, id="2 nccl", marks=pytest.mark.multi_gpu(2)),
    pytest.param("nccl", 4, id="4 nccl", marks=pytest.mark.multi_gpu(4)),
]


class Notebook:
    """A kernel, and cells that it runs."""

    def __init__(self, backend, n):
        path = os.pathsep.join(filter(None, sys.path))
        self.manager, self.client = start_new_kernel(kernel_name="python3", env={**os.environ, "PYTHONPATH": path})
        self.backend, self.n = backend, n
        self.pids = self.start()

    def start(self):
        """Starts the ranks; their pids."""
        self.run("%load_ext workbench")
        self.run(f"%%ranks -n {self.n} --backend {self.backend}\nimport os, time, torch, torch.distributed as dist")
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
        device = "cuda" if self.backend == "nccl" else "cpu"
        shown = self.run(f"%%ranks\nx = torch.ones(1, device='{device}')\ndist.all_reduce(x)\nx.item()")
        return shown.strip().endswith(f": {float(self.n)}")

    def hang(self):
        """Begins a cell that never ends: one rank computes, and the others wait for it."""
        message = self.send("%%ranks\nprint('begun')\nwhile dist.get_rank() == 1:\n    pass\ndist.barrier()")
        begun, limit = 0, time.monotonic() + 30
        while begun < self.n and time.monotonic() < limit:
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

    def make(backend, n):
        made.append(Notebook(backend, n))
        assert len(made[-1].pids) == n and all(map(alive, made[-1].pids))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "n"), GROUPS)
def test_interrupts_of_the_kernel_twice_in_a_row(notebook, row, backend, n):
    book = notebook(backend, n)
    for turn in range(2):
        hanging, pids, start = book.hang(), book.pids, time.monotonic()
        book.manager.interrupt_kernel()
        shown = book.read(hanging)
        seconds = time.monotonic() - start
        left = wait_until_gone(pids, 0)
        assert "KeyboardInterrupt: the ranks were ended." in shown and "rank 1: busy in <module>" in shown
        assert seconds < SOON
        row(f"{n} {backend}", f"interrupt of the kernel, number {turn + 1}", seconds, left, book.works())
        book.pids = book.start()


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "n"), GROUPS)
@pytest.mark.parametrize("how", ["restart", "shutdown", "kill -9"])
def test_the_end_of_the_kernel(notebook, row, backend, n, how):
    book = notebook(backend, n)
    book.hang()
    start = time.monotonic()
    if how == "kill -9":
        os.kill(book.manager.provisioner.pid, signal.SIGKILL)
    elif how == "shutdown":
        book.manager.shutdown_kernel()
    else:
        book.manager.restart_kernel(now=False)
    left = wait_until_gone(book.pids, 10)
    row(f"{n} {backend}", f"{how} of the kernel", time.monotonic() - start, left, notebook(backend, n).works())
