"""The process behind one rank: `python -m workbench.world.worker JOB`, started by `workbench.world.local`, or a fork.

It joins the default process group, says "ready", then runs one call after another until it is told to stop
or its parent goes away. torch is imported late, so that a parent that dies meanwhile is noticed.

A pool that listens (`ranks(n, listen=...)`) is called by workers that torchrun starts, on any machine:

    torchrun --nnodes 2 --nproc-per-node 4 ... -m workbench.world.worker --connect HOST:PORT [--key-file PATH]
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.world.pickling import dumps
from workbench.world.registered import unpack

if TYPE_CHECKING:
    from workbench.world.remote import Output

_FOR_LIFE = ExitStack()
PARENT_CHECK_SECONDS = 2.0
LEAVE_SECONDS = 4.0
GROUP_TIMEOUT = timedelta(days=1)
"""The pool's own time limit must strike first: it shows stacks, the process group's does not."""


class Parent:
    """The channel to the pool: one thread listens, and several speak."""

    def __init__(self, channel: Connection) -> None:
        self.channel, self._speaking = channel, threading.Lock()
        self.output: Output | None = None
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def send(self, kind: str, body: Any) -> None:
        raw = isinstance(body, bytes)  # a pickle already, and maybe a large one: once more would copy it
        with self._speaking:
            self.channel.send_bytes(pickle.dumps((kind, None if raw else body, raw)))
            if raw:
                self.channel.send_bytes(body)

    def listen(self, job: dict[str, Any]) -> None:
        """Feed the main thread. When the parent is gone, end this rank and what it started, whatever it is doing."""
        try:
            while True:
                while not self.channel.poll(PARENT_CHECK_SECONDS):
                    # A child that the parent forked may hold the other end open: look for the parent as well.
                    if os.getppid() != job["parent"]:
                        raise EOFError
                command, *body = pickle.loads(self.channel.recv_bytes())
                if command == "aside":
                    question, *asked = body
                    self.send("aside", (question, _aside(*asked)))
                else:
                    self.calls.put((command, *body))
        except (EOFError, OSError):
            if "folder" in job:
                shutil.rmtree(job["folder"], ignore_errors=True)
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(1)


def _aside(what: str, *args: Any) -> Any:
    """Answer a question while the main thread may be in a call. One that fails is answered with nothing."""
    questions: dict[str, tuple[Callable[..., Any], Any]] = {
        "look": (_look, {"launches": [], "host_bytes": 0, "gpu_bytes": None}), "stacks": (_stacks, ""),
        "complete": (_complete, []), "prepare": (_prepare, None)}
    answer, nothing = questions[what]
    try:
        return answer(*args)
    except Exception as error:
        print(f"asked for {what}: {type(error).__name__}: {error}", file=sys.stderr)
        return nothing


def _look(what: str = "last") -> dict[str, Any]:
    """This rank's memory, and its collectives: the last one, "all", or all with their source "lines"."""
    from workbench.torch_api.distributed.flight_recorder import launches
    from workbench.world.divergence import user_frame

    found = launches(stacks=what == "lines")
    torch = sys.modules["torch"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"launches": [user_frame(launch) for launch in (found[-1:] if what == "last" else found)],
            "host_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            "gpu_bytes": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None}


def _prepare() -> None:
    """What takes a second at the first look for source lines, done now beside the calls, so that a report need not."""
    from workbench.torch_api.distributed.flight_recorder import prepare

    threading.Thread(target=prepare, daemon=True, name="prepare").start()


def _stacks() -> str:
    """The stacks of all threads, as faulthandler writes them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _complete(text: str) -> list[str]:
    from workbench.world.cells import complete

    return complete(text)


def _describe(error: BaseException) -> dict[str, str]:
    """The error as text: the parent may not have its class. Frames of the pool itself are left out."""
    trace = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"type": type(error).__name__, "summary": summary, "traceback": text}


def _call(path: list[str], own: bytes, payload: bytes) -> tuple[str, Any]:
    """Run one call. Returns (kind, body): "ok" with a pickle; "load", "error" or "unsent" with a description."""
    kind = "load"
    try:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        if own:
            unpack(own)
        fn, args, kwargs = pickle.loads(payload)
        kind = "error"
        result = fn(*args, **kwargs)
        kind = "unsent"
        return "ok", dumps(result)
    except BaseException as error:  # SystemExit too: the pool decides when a rank ends
        return kind, _describe(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _join(job: dict[str, Any]) -> None:
    """Initialise the default process group: through a file that only this user can read, or torchrun's store."""
    import torch
    import torch.distributed as dist

    from workbench.torch_api.distributed.gloo import one_worker_thread

    device = None
    if job["backend"] == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store: dist.Store
    if "store" in job:
        store = dist.FileStore(job["store"], job["size"])
    else:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # The store outlives the ranks: each generation has its own part of it.
        store = dist.PrefixStore(job["generation"], dist.TCPStore(*address, is_master=False))
    _FOR_LIFE.enter_context(one_worker_thread())  # the meshes of a user's cell, too
    dist.init_process_group(job["backend"], store=store, rank=job["rank"], world_size=job["size"],
                            timeout=GROUP_TIMEOUT, device_id=device)


def _leave() -> None:
    """Destroy the process group, within bounds. What the calls left goes first: a CUDA graph must not outlive it."""
    bound = threading.Timer(LEAVE_SECONDS, os._exit, (0,))
    bound.daemon = True
    bound.start()
    import torch.distributed as dist

    from workbench.torch_api.cuda_graphs import close_recorders
    from workbench.world.cells import forget

    forget()
    gc.collect()
    close_recorders()

    if dist.is_initialized():
        dist.destroy_process_group()


def serve(parent: Parent, job: dict[str, Any]) -> None:
    """Join the group, and answer one call after another."""
    threading.Thread(target=parent.listen, args=(job,), daemon=True, name="parent").start()
    try:
        _join(job)
    except BaseException as error:
        parent.send("error", _describe(error))
        raise SystemExit(1) from None
    parent.send("ready", None)
    while True:
        command, *body = parent.calls.get()
        if command == "stop":
            break
        answer = _call(*body)
        if parent.output is not None:
            parent.output.drain()
        parent.send(*answer)
        del body, answer  # do not keep the arguments alive until the next call
    _leave()


def main() -> None:
    """Serve the job described by the first argument (JSON, from `LocalGang`), or the pool at `--connect`."""
    if sys.argv[1].startswith("--"):
        _set_streams()
        _serve_far()
    else:
        serve_job(json.loads(sys.argv[1]))


def serve_job(job: dict[str, Any]) -> None:
    """Serve the pool whose `LocalGang` made this job."""
    _set_streams()
    stacks = open(job["stacks"], "w")  # noqa: SIM115 - the signal handler writes to it while the process lives
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    serve(Parent(Connection(job["channel"])), job)


def _set_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def _serve_far() -> None:
    """Serve the pool that listens at `--connect`. What torchrun started stays, and starts rank after rank."""
    from workbench.errors import WorkbenchError
    from workbench.world.remote import Output, dial, keep_a_rank, read_arguments, read_key

    try:
        asked = read_arguments()
        if not asked.rank:
            keep_a_rank()
        hello = {"rank": int(os.environ["RANK"]), "size": int(os.environ["WORLD_SIZE"]), "pid": os.getpid()}
        channel, job = dial(asked.connect, read_key(asked.key_file), hello)
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # CUDA graphs need it, and NCCL reads it once
    faulthandler.enable(file=os.dup(2))  # torchrun's log
    parent = Parent(channel)
    parent.output = Output(parent.send)
    threading.Thread(target=parent.output.pump, daemon=True, name="output").start()
    serve(parent, job | {"parent": os.getppid()})


if __name__ == "__main__":
    # The module under its own name: what is pickled must not name __main__, which belongs to the cells.
    from workbench.world.worker import main as _main

    _main()
