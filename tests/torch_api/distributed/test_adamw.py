"""AdamW on shards: torch's bits, and no list of DTensors in its operators. The fused one on fake tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.torch_api.distributed.adamw import FUSED, ShardedAdamW

pytestmark = [pytest.mark.integration, pytest.mark.ranks]


class Lists(TorchDispatchMode):
    """Notes whether the fused AdamW was given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adamw_" in str(func):
            self.seen.append(isinstance(args[0][0], DTensor))
        return func(*args, **(kwargs or {}))


def trained(kind: type[torch.optim.AdamW], partial: bool) -> tuple[list[torch.Tensor], list[list[Any]], list[bool]]:
    """Parameters after three steps, the state's placements, and whether operators got DTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)
    held = [torch.nn.Parameter(distribute_tensor(torch.randn(6, 4, generator=generator), mesh, [placement]))
            for placement in (Shard(0), Shard(1), Replicate())]
    optimizer = kind(held, lr=torch.tensor(0.1, dtype=torch.float64), fused=True)
    with Lists() as lists:
        for _ in range(3):
            for i, parameter in enumerate(held):
                whole = torch.randn(6, 4, generator=generator)
                parameter.grad = distribute_tensor(whole, mesh, parameter.placements)
                if partial and i == 2:
                    parameter.grad = DTensor.from_local(whole / dist.get_world_size(), mesh, [Partial()])
            optimizer.step()
    placed = [[list(state[key].placements) for key in ("exp_avg", "exp_avg_sq")] for state in optimizer.state.values()]
    return [parameter.detach().to_local() for parameter in held], placed, lists.seen


def compared(partial: bool) -> tuple[list[bool], bool, list[bool], list[bool]]:
    ours, placed, seen = trained(ShardedAdamW, partial)
    theirs, wanted, dtensors = trained(torch.optim.AdamW, partial)
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)], placed == wanted, seen, dtensors


def test_bits_and_state_are_those_of_torch(pool2: Any) -> None:
    for partial in (False, True):  # one gradient is a partial sum
        for same, placed, seen, dtensors in pool2.run(compared, partial):
            assert same == [True] * 3 and placed
            assert seen == [partial] * 3 and dtensors == [True] * 3


def test_fake_tensors_take_no_memory() -> None:
    """Four lists of 4 TiB, which no machine holds: torch without a meta kernel runs the operator on zeros."""
    with FakeTensorMode():
        lists = [[torch.empty(2**40)] for _ in range(4)]
        scalar = torch.empty(())
        found = FUSED(*lists, [], [scalar], lr=scalar, beta1=0.9, beta2=0.9, weight_decay=0.1, eps=1e-8,
                      amsgrad=False, maximize=False)
    assert found is None
