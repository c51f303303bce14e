"""The process of one rank: `python -m workbench.world.worker JOB`, started by the pool.

It joins the default process group, sends "ready", then runs one call after another until the pool sends "stop" or
goes away. It imports torch after it starts to listen, so that it notices a pool that dies meanwhile.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench.world.pickling import dumps
from workbench.world.registered import unpack

_FOR_LIFE = ExitStack()
_POOLS: list[Parent] = []  # one, in a rank
PARENT_CHECK_SECONDS = 2.0
LEAVE_SECONDS = 4.0
GROUP_TIMEOUT = timedelta(days=1)
"""Longer than any call: the pool's own limit must end it, since only the pool shows stacks."""


class Parent:
    """The channel to the pool: one thread receives, several send."""

    def __init__(self, channel: Connection) -> None:
        self.channel, self._speaking = channel, threading.Lock()
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def send(self, kind: str, body: Any) -> None:
        # already a pickle, maybe a large one: pickling it again would copy it
        raw = isinstance(body, bytes)
        with self._speaking:
            self.channel.send_bytes(pickle.dumps((kind, None if raw else body, raw)))
            if raw:
                self.channel.send_bytes(body)

    def listen(self, job: dict[str, Any]) -> None:
        """Pass calls to the main thread. When the parent is gone, kill this rank and its children, whatever they do."""
        try:
            while True:
                while not self.channel.poll(PARENT_CHECK_SECONDS):
                    # A child that the parent forked may hold the other end open: check the parent, too.
                    if os.getppid() != job["parent"]:
                        raise EOFError
                command, *body = pickle.loads(self.channel.recv_bytes())
                if command == "aside":
                    question, *asked = body
                    self.send("aside", (question, _aside(*asked)))
                else:
                    self.calls.put((command, *body))
        except Exception:  # it has gone, or what came is no message
            shutil.rmtree(job["folder"], ignore_errors=True)
            os.killpg(os.getpid(), signal.SIGKILL)


def _aside(question: str, *args: Any) -> Any:
    """Answer a question, maybe during a call. None if that fails."""
    questions: dict[str, Callable[..., Any]] = {"look": _look, "complete": _complete}
    try:
        return questions[question](*args)
    except Exception as error:
        print(f"asked for {question}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def _look(detail: str = "last") -> dict[str, Any]:
    """This rank's memory, and its collectives: the last one, "all", or all with their source "lines"."""
    from workbench.torch_api.distributed.flight_recorder import launches
    from workbench.world.divergence import user_frame

    recorded = launches(stacks=detail == "lines")
    torch = sys.modules["torch"]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    if detail == "last":
        recorded = recorded[-1:]
    return {
        "launches": [user_frame(launch) for launch in recorded],
        "host_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "gpu_bytes": torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None,
    }


def _complete(text: str) -> list[str]:
    from workbench.world.cells import complete

    return complete(text)


def _describe(error: BaseException) -> dict[str, str]:
    """The error as text, since the parent may not have its class. The pool's own frames are left out."""
    trace = error.__traceback__
    while trace is not None and os.path.dirname(
        trace.tb_frame.f_code.co_filename
    ) == os.path.dirname(__file__):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"type": type(error).__name__, "summary": summary, "traceback": text}


def _call(path: list[str], registrations: bytes, payload: bytes) -> tuple[str, Any]:
    """Run one call. Returns (kind, body): "ok" with a pickle; "load", "error" or "unsent" with a description."""
    kind = "load"
    try:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        if registrations:
            unpack(registrations)
        fn, args, kwargs = pickle.loads(payload)
        kind = "error"
        result = fn(*args, **kwargs)
        kind = "unsent"
        return "ok", dumps(result)
    except BaseException as error:  # SystemExit, too: only the pool ends a rank
        return kind, _describe(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _join(job: dict[str, Any]) -> None:
    """Initialise the default process group, through a file that only this user can read."""
    import torch.distributed as dist

    from workbench.torch_api.distributed.gloo import one_worker_thread
    from workbench.torch_api.distributed.nccl import own_gpu

    device = own_gpu(job["backend"], int(os.environ["LOCAL_RANK"]))
    store = dist.FileStore(job["store"], job["size"])
    _FOR_LIFE.enter_context(one_worker_thread())  # also for meshes that a user's cell makes
    dist.init_process_group(job["backend"], store=store, rank=job["rank"], world_size=job["size"],
                            timeout=GROUP_TIMEOUT, device_id=device)


def _report_before_abort(parent: Parent) -> None:
    """Tell the pool what this rank launched before C++ aborts the process: only this rank knows it.

    gloo throws in a thread of its own where a peer sends more bytes than a collective expects, and NCCL's watchdog
    where a peer is gone. No thread catches that, so libstdc++ calls this handler and then aborts.
    """
    libstdcxx = ctypes.CDLL("libstdc++.so.6")  # torch has loaded it
    set_handler, handler_type = libstdcxx._ZSt13set_terminatePFvvE, ctypes.CFUNCTYPE(None)
    set_handler.restype = ctypes.c_void_p

    def report() -> None:
        if look := _aside("look", "lines"):
            parent.send("launches", look["launches"])
        default()

    handler = handler_type(report)
    default = handler_type(set_handler(handler))
    _FOR_LIFE.callback(lambda *_: set_handler(default), handler)  # Python may be gone when C++ ends


def _leave() -> None:
    """Destroy the process group within LEAVE_SECONDS, after the calls' objects: a CUDA graph must not outlive it."""
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
    _FOR_LIFE.close()


def send_progress(message: Any) -> None:
    """In a rank, during a call: send something to the `progress` of the call's `run_on`."""
    for pool in _POOLS:
        pool.send("progress", message)


def serve() -> None:
    """Join the process group of the job in the first argument, and answer its pool's calls until that sends "stop"."""
    job = json.loads(sys.argv[1])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    stacks = open(job["stacks"], "w")  # noqa: SIM115 - the signal handler writes to it while the process lives
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    parent = Parent(Connection(job["channel"]))
    _POOLS.append(parent)
    threading.Thread(target=parent.listen, args=(job,), daemon=True, name="parent").start()
    try:
        _join(job)
        _report_before_abort(parent)
    except BaseException as error:
        parent.send("error", _describe(error))
        raise SystemExit(1) from None
    parent.send("ready", None)
    while True:
        command, *body = parent.calls.get()
        if command == "stop":
            break
        answer = _call(*body)
        parent.send(*answer)
        del body, answer  # do not keep the arguments alive until the next call
    _leave()


if __name__ == "__main__":
    # The module under its own name: what is pickled must not name __main__, which belongs to the cells.
    from workbench.world.worker import serve as _serve

    _serve()
