"""torch's operators that send through symmetric memory while they multiply, and what they need of a machine.

Source: torch/distributed/_symmetric_memory/__init__.py. The operators have CUDA kernels and fake ones.
"""

from __future__ import annotations

import socket
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symm_mem
from torch.distributed.distributed_c10d import _resolve_process_group


def missing_for(group: str) -> str:
    """What the machine lacks to run the operators over this process group; "" if nothing.

    Every rank of the group must call it, on a world that runs on GPUs, and every rank gets the same answer.
    """
    answers: list[Any] = [None] * dist.get_world_size(_resolve_process_group(group))  # type: ignore[arg-type]
    here = (socket.gethostname(), torch.cuda.current_device())
    dist.all_gather_object(answers, here, group=_resolve_process_group(group))  # type: ignore[arg-type]
    hosts = sorted({host for host, _ in answers})
    lacking = (
        f"the ranks of {group!r} are on {len(hosts)} hosts, {', '.join(hosts)}"
        if len(hosts) > 1
        else ""
    )
    for _, other in answers if not lacking else ():
        if other != here[1] and not torch.cuda.can_device_access_peer(here[1], other):
            lacking = (
                f"GPU {here[1]} cannot read the memory of GPU {other} (no peer-to-peer access)"
            )
    dist.all_gather_object(answers, lacking, group=_resolve_process_group(group))  # type: ignore[arg-type]
    return next(filter(None, answers), "")


def enable(group: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # said to be no longer needed, and it is
        symm_mem.enable_symm_mem_for_group(group)  # type: ignore[arg-type]


def reserve(group: str, size: int) -> None:
    """Allocate the group's workspace. It cannot grow while a CUDA graph is recorded. Every rank of it must call this.
    """
    enable(group)
    symm_mem.get_symm_mem_workspace(group, size)  # type: ignore[arg-type]
