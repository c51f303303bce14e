"""A pool of real ranks for notebooks: one process for each rank, kept running between calls.

    with ranks(4) as pool:
        losses = pool.run(train, recipe)    # `train` may be defined in a notebook cell

An error names the failing rank, a call that hangs ends with every rank's stack, and no rank outlives this process.
"""

from __future__ import annotations

from collections.abc import Mapping

from workbench.errors import WorkbenchError
from workbench.world.bounds import refuse_too_many
from workbench.world.diagnosis import RankError
from workbench.world.pool import RankPool

__all__ = ["RankError", "RankPool", "ranks"]

BACKENDS = ("auto", "gloo", "nccl")


def ranks(
    n: int,
    backend: str = "auto",
    timeout: float = 60.0,
    echo: str = "live",
    env: Mapping[str, str] | None = None,
    check: bool = False,
) -> RankPool:
    """Start `n` ranks on this machine and return their pool; use it in a `with`, or call `close()`.

    `backend`: "nccl" (one GPU for each rank), "gloo" (CPU; its ranks see no GPU), or "auto": nccl if there are enough
    GPUs. `timeout`: seconds that one call may take. `echo`: show the ranks' output "live", "grouped" by rank after each
    call, of "rank0" only, or "none". `env`: environment variables for the ranks, on top of this process's. The ranks'
    OMP_NUM_THREADS is the cores divided by `n`, unless it is set. `check`: torch compares each collective's operator
    and shapes among the ranks before it runs (TORCH_DISTRIBUTED_DEBUG=DETAIL): slower, and names a mismatch at once.

    Raises WorkbenchError for arguments that cannot work here, RankError if the ranks do not start.
    """
    backend = resolve(backend, n)
    # fully_shard would move a model to a GPU
    env = ({"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}) | dict(env or {})
    env |= {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if check else {}
    return RankPool(n, backend, timeout, echo, env)


def resolve(backend: str, n: int) -> str:
    """The backend of `n` ranks on this machine, with `auto` resolved to gloo or nccl.

    Raises WorkbenchError for arguments that cannot work.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise WorkbenchError(f"ranks(n={n!r}): n must be a whole number, 1 or more.")
    if backend not in BACKENDS:
        raise WorkbenchError(
            f"ranks(backend={backend!r}): backend must be one of {', '.join(BACKENDS)}."
        )
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if gpus >= n and torch.distributed.is_nccl_available() else "gloo"
    if backend == "nccl" and not gpus:
        raise WorkbenchError(
            "ranks(backend='nccl'): no CUDA GPU can be used here. Use backend='gloo' or 'auto'."
        )
    if backend == "nccl" and n > gpus:
        have = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise WorkbenchError(
            f"ranks(n={n}, backend='nccl'): {n} ranks need {n} GPUs, and this machine has {have}. "
            f"Use n={gpus} or fewer, or backend='gloo'."
        )
    refuse_too_many(n)
    return backend
