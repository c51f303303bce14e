"""NCCL in CUDA graphs: the setting that a recording of its collectives needs."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from workbench.errors import WorkbenchError

REGISTER = "NCCL_GRAPH_REGISTER"
"""NCCL reads it once, when it starts. Unless it is 0, NCCL registers buffers of a recording's memory pool, and with
expandable segments that ends in an illegal memory access.
"""


def own_gpu(backend: str, local_rank: int) -> torch.device | None:
    """This rank's GPU, current from now on, for `init_process_group`; None for other backends than nccl.

    Also prepares NCCL for CUDA graphs, unless the user has set its variable.
    """
    if backend != "nccl":
        return None
    os.environ.setdefault(REGISTER, "0")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def refuse_registered_buffers() -> None:
    """Raise WorkbenchError where NCCL runs with a setting under which its collectives cannot be recorded.

    One rank has no collectives.
    """
    if not dist.is_initialized() or dist.get_backend() != "nccl" or dist.get_world_size() == 1:
        return
    if os.environ.get(REGISTER) != "0":
        raise WorkbenchError(
            f"pass 'cudagraph' records NCCL's collectives, and NCCL was started here without "
            f"{REGISTER}=0: set it in this process's environment before init_process_group, "
            "or drop the pass"
        )
