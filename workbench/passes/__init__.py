"""One file a pass, and the table that they register in.

    activation_checkpointing  which forward values are saved or recomputed
    bucketing                 many small collectives become few large ones
    cleanup                   views and dead code that do nothing
    cudagraph                 record a direction once, replay it with one launch
    decomposition             operators become primitives that Inductor lowers
    effect                    Effect: what a pass's predicate found
    full_inductor             each graph becomes one compiled callable
    overlap                   independent work moves behind collectives
    regional_inductor         named regions are compiled by Inductor
    registry                  @register_pass, and the table of passes
    reshard                   free gathered parameters after the forward
"""

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
