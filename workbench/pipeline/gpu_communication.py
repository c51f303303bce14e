"""Which events of a GPU's profile communicate, by their names: all others compute. No torch here."""

from __future__ import annotations

import re

COMPUTE, NCCL, COPY, SYMMETRIC = "compute", "NCCL", "peer copy", "symmetric memory"
_SYMMETRIC = re.compile(r"(barrier|put_signal|wait_signal)_kernel|(one|two)_shot_all_reduce|multimem_|nvshmem|symm_mem|"
                        r"stream_(write|wait)_value", re.I)


def kind_of(name: str) -> str:
    """COMPUTE, or how it communicates: by NCCL, by a copy from GPU to GPU, or through symmetric memory.

    Names as CUPTI gives them; those of symmetric memory are the kernels of
    torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu. A fused operator that waits inside its own kernel
    counts as COMPUTE, since its name does not say for how long it waits.
    """
    if "nccl" in name.lower():
        return NCCL
    if name.startswith("Memcpy"):
        return COPY if "PtoP" in name else COMPUTE
    return SYMMETRIC if _SYMMETRIC.search(name) else COMPUTE
