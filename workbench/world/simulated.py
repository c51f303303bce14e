"""Every rank's values in one process, eager and slow: to see what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from workbench.torch_api.distributed.simulated import is_per_rank, per_rank_values, simulate_ranks
from workbench.world.mesh import World, opened


@contextmanager
def simulated_world(size: int) -> Iterator[World]:
    """Run the block as all of `size` ranks at once, on the CPU, with real collectives between their values.

    A step of the debug model takes seconds. Capture on a fake world instead: a graph captured here would hold rank 0's
    constants only. WorldError if a process group already exists.
    """
    world = World("simulated", size, 0, torch.device("cpu"))
    with opened("simulated_world", world), simulate_ranks(size):
        yield world


def shards(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """What each rank holds of a DTensor (its shard) or of a local tensor, by rank. Simulated worlds only."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    return per_rank_values(local) if is_per_rank(local) else {0: local}
