"""One module a pass; importing the package registers them all."""

from workbench.passes import (
    activation_checkpointing,
    bucketing,
    cleanup,
    cudagraph,
    decomposition,
    full_inductor,
    overlap,
    regional_inductor,
    reshard,
)

__all__ = [
    "activation_checkpointing",
    "bucketing",
    "cleanup",
    "cudagraph",
    "decomposition",
    "full_inductor",
    "overlap",
    "regional_inductor",
    "reshard",
]
