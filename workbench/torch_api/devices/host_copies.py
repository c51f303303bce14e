"""Copies between a GPU and pinned host memory on streams of their own, as operators with a wait like collectives'.

`to_host` and `to_device` start a copy behind the work that the current stream has so far, and `wait_copy` lets the
current stream wait for it. The CPU does not wait, so nothing on it may read a copy: `to_host` gives the strides that
the graph promises, since Inductor, which lays tensors out as it likes, would restride the copy by a kernel of the CPU.
Inductor calls the operators as they stand. Pinned buffers are used again from step to step; those of a CUDA graph
belong to it alone (`recorded`). Where there is no GPU, copies are plain ones and a wait does nothing.

torch._functorch._activation_offloading has such operators, too, in torch 2.13. Its wait frees the source by resizing
its storage to 0, which a buffer that Inductor uses again, or a CUDA graph owns, does not survive. `run_on_cpu` lets
graphs of other people's passes that have them be compared on a CPU.

Source: torch/csrc/Module.cpp (`current_stream`), torch/library.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config

from workbench.errors import WorkbenchError

_OPS = torch.library.Library("workbench", "DEF")
_OPS.define("to_host(Tensor x, SymInt[] stride) -> Tensor")
_OPS.define("to_device(Tensor host, Device device) -> Tensor")
_OPS.define("wait_copy(Tensor(a) copy, Tensor source) -> Tensor(a)")
TO_HOST = torch.ops.workbench.to_host.default
TO_DEVICE = torch.ops.workbench.to_device.default
WAIT = torch.ops.workbench.wait_copy.default

_free: dict[tuple[Any, ...], list[torch.Tensor]] = {}  # pinned buffers by layout
_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
# what a copy reads, by the address of what it writes
_pending: dict[int, tuple[torch.cuda.Event, torch.Tensor]] = {}
_recordings: list[list[torch.Tensor]] = []  # the buffers of each recording under way


@contextmanager
def recorded() -> Iterator[list[torch.Tensor]]:
    """The pinned buffers of the copies that are recorded inside. Each replay writes them: keep them as long as it.

    No other copy gets them, or a replay would write over what it has on the host.
    """
    _recordings.append([])
    try:
        yield _recordings[-1]
    finally:
        _recordings.pop()


def require_alone() -> None:
    """Raise WorkbenchError where torch's partitioner is told to put saved tensors on the host, too."""
    if getattr(functorch_config, "enable_activation_offloading", False):
        raise WorkbenchError(
            "torch._functorch.config.enable_activation_offloading is on, and its partitioner chooses "
            "tensors for the host, too: turn it off, or drop the pass"
        )


def require_pinned() -> None:
    """Raise WorkbenchError where the host has no pinned memory for this GPU."""
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        raise WorkbenchError(f"no pinned host memory: {str(error).splitlines()[0]}") from None


def _layout(like: torch.Tensor) -> tuple[Any, ...]:
    return tuple(like.shape), tuple(like.stride()), like.dtype


def _copy(source: torch.Tensor, copy: torch.Tensor, device: torch.device, way: str) -> torch.Tensor:
    stream = _streams.get((device, way))
    if stream is None:
        stream = _streams[device, way] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
    _pending[copy.data_ptr()] = stream.record_event(), source
    return copy


def _to_host(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    if not x.is_cuda:
        return torch.empty_strided(x.shape, stride, dtype=x.dtype).copy_(x)
    if x.stride() != tuple(stride):
        x = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
    free = _free.get(_layout(x)) if not _recordings else None
    host = (
        free.pop() if free else torch.empty_strided(x.shape, stride, dtype=x.dtype, pin_memory=True)
    )
    if _recordings:
        _recordings[-1].append(host)
    return _copy(x, host, x.device, "to host")


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if torch.device(device).type != "cuda":
        return host.clone()
    copy = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return _copy(host, copy, copy.device, "to device")


def _wait(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    started = _pending.pop(copy.data_ptr(), None)
    if started is not None:
        torch.cuda.current_stream((copy if copy.is_cuda else source).device).wait_event(started[0])
        # it is on the GPU again: another copy may take its buffer
        if not source.is_cuda and not _recordings:
            _free.setdefault(_layout(source), []).append(source)
    return copy


_OFFLOADING = "torch._functorch._activation_offloading.offload_ops"


def run_on_cpu() -> None:
    """Let torch's own operators of offloading run on a CPU, which they do not, where this process has imported them."""
    if (theirs := sys.modules.get(_OFFLOADING)) is not None:
        _register_on_cpu(theirs)


@functools.cache
def _register_on_cpu(theirs: Any) -> None:
    @theirs.offload.register_kernel("cpu")
    def _offload(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    @theirs.reload.register_kernel("cpu")
    def _reload(tensor: torch.Tensor, device: torch.device, size: Any = None, stride: Any = None) -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return theirs.reload._init_fn(tensor, device, size, stride)
        return torch.empty_strided(size or tensor.shape, stride or tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    @torch.library.impl("ao::wait_tensor", "cpu")
    def _wait_tensor(tensor: torch.Tensor, keepalive: Any = None, last_use_of_storage: Any = None) -> torch.Tensor:
        if tensor.data_ptr() in theirs._wait_registry:
            return theirs._ao_wait_tensor(tensor, keepalive, last_use_of_storage)
        if keepalive is not None:  # NaN in what a GPU would free: a read of memory of size 0 may end the process
            torch.empty(0, dtype=torch.uint8).set_(keepalive.untyped_storage()).fill_(255)
        return tensor


for _name, _function in (("to_host", _to_host), ("to_device", _to_device), ("wait_copy", _wait)):
    _OPS.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("workbench::to_host", lib=_OPS)
def _(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device="cpu")


@torch.library.register_fake("workbench::to_device", lib=_OPS)
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


@torch.library.register_fake("workbench::wait_copy", lib=_OPS)
def _(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return copy
