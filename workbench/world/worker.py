"""The process behind one rank. `workbench.world.ranks` starts it as `python -m workbench.world.worker JOB`.

It joins the default process group, says "ready", then runs one call after another until it is told to stop
or its parent goes away. torch is imported late, so that a parent that dies meanwhile is noticed.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

NAMESPACE: dict[str, Any] = {}
"""Lives as long as the rank does: what one call leaves here the next call finds."""

PARENT_CHECK_SECONDS = 2.0
LEAVE_SECONDS = 4.0


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles for another process: tensors on the host, and no more storage than they show."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            dtensor = sys.modules.get("torch.distributed.tensor")
            if dtensor is not None and isinstance(obj, dtensor.DTensor):
                raise TypeError("a DTensor means nothing outside its ranks: send x.to_local() or x.full_tensor()")
            if type(obj) in (torch.Tensor, torch.nn.Parameter):
                sent = _on_host(obj)
                if sent is not obj:
                    return sent.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _on_host(tensor: Any) -> Any:
    import torch

    on_device = tensor.device.type not in ("cpu", "meta")
    dense = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
    # A view would drag the whole storage along; sharing between the tensors of a result is worth less.
    wasteful = dense and tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
    if not (on_device or wasteful):
        return tensor
    host = tensor.detach().cpu() if on_device else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(host, tensor.requires_grad)
    return host.requires_grad_(tensor.requires_grad)


def dumps(value: Any) -> bytes:
    """Pickle `value` for another process, cell-defined functions and classes by value.

    CUDA tensors arrive on the host. Raises TypeError for a DTensor and whatever pickle raises for the rest.
    """
    buffer = io.BytesIO()
    _ResultPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _describe(error: BaseException) -> dict[str, str]:
    """The error as text: the parent may not have its class. Frames of this file are left out."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    return {"type": type(error).__name__, "summary": summary, "traceback": text}


def _call(path: list[str], payload: bytes) -> tuple[str, Any]:
    """Run one call. Returns (kind, body): "ok" with a pickle; "load", "error" or "unsent" with a description."""
    kind = "load"
    try:
        sys.path.extend(entry for entry in path if entry not in sys.path)
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


def _listen(channel: Connection, calls: queue.SimpleQueue[tuple[Any, ...]], job: dict[str, Any]) -> None:
    """Feed the main thread. When the parent is gone, end this rank and what it started, whatever it is doing."""
    try:
        while True:
            while not channel.poll(PARENT_CHECK_SECONDS):
                # A child that the parent forked may hold the other end open: look for the parent as well.
                if os.getppid() != job["parent"]:
                    raise EOFError
            calls.put(pickle.loads(channel.recv_bytes()))
    except (EOFError, OSError):
        shutil.rmtree(job["folder"], ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


def _join(job: dict[str, Any]) -> None:
    """Initialise the default process group through a file that only this user can read."""
    import torch
    import torch.distributed as dist

    device = None
    if job["backend"] == "nccl":
        device = torch.device("cuda", job["rank"])
        torch.cuda.set_device(device)
    dist.init_process_group(
        job["backend"],
        store=dist.FileStore(os.path.join(job["folder"], "store"), job["size"]),
        rank=job["rank"],
        world_size=job["size"],
        timeout=timedelta(seconds=job["group_timeout"]),
        device_id=device,
    )


def _leave() -> None:
    """Destroy the process group, within bounds. What the calls left goes first: a CUDA graph must not outlive it."""
    bound = threading.Timer(LEAVE_SECONDS, os._exit, (0,))
    bound.daemon = True
    bound.start()
    NAMESPACE.clear()
    gc.collect()
    import torch.distributed as dist

    from workbench.torch_api.cuda_graphs import close_recorders

    close_recorders()

    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Serve the job described by the first argument (JSON; `ranks._job` writes it)."""
    job = json.loads(sys.argv[1])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    stacks = open(job["stacks"], "w")  # noqa: SIM115 - the signal handler writes to it as long as the process lives
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    channel = Connection(job["channel"])
    calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, calls, job), daemon=True, name="parent").start()
    try:
        _join(job)
    except BaseException as error:
        channel.send_bytes(pickle.dumps(("error", _describe(error))))
        raise SystemExit(1) from None
    channel.send_bytes(pickle.dumps(("ready", None)))
    while True:
        command, *body = calls.get()
        if command == "stop":
            break
        channel.send_bytes(pickle.dumps(_call(*body)))
        del body  # do not keep the arguments alive until the next call
    _leave()


if __name__ == "__main__":
    # The module under its own name, not __main__, so that NAMESPACE exists once.
    from workbench.world.worker import main as _main

    _main()
