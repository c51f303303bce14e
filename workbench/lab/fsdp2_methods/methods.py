"""FSDP2's methods on the modules of an adopted model: what works, what is a hint, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from workbench.authoring.adopt import UNIT, AdoptedUnit
from workbench.authoring.plans import AuthoringError
from workbench.lab.fsdp2_methods.accumulation import set_sync

_HINTS = {"reshard", "reset_iter_state", "set_is_last_backward", "set_modules_to_backward_prefetch",
          "set_modules_to_forward_prefetch", "set_post_optim_event", "set_reduce_scatter_max_input_buffers",
          "set_reshard_after_backward", "set_separate_reduce_scatter_group", "set_unshard_in_backward",
          "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"}
"""These choose when FSDP2 gathers, frees or waits. Here the passes choose, and each forward gathers again."""


class AdoptedModule:
    """What an adopted module has of `FSDPModule`. Methods that would change values are refused."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients add up on this rank. True: the next backward reduces the sum.

        The parameters of all microbatches are gathered at the first `False`, so call it after the optimizer's step.
        """
        set_sync(_units(self, recurse), requires_gradient_sync)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the backward gathers again, for graphs that are captured from now on."""
        for unit in _units(self, recurse):
            unit.reshard = reshard_after_forward

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Nothing to do: a parameter is gathered wherever it is read."""
        return UnshardHandle() if async_op else None


def _units(module: Any, recurse: bool) -> list[AdoptedUnit]:
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(vars(m)[UNIT] for m in modules if UNIT in vars(m)))


def _method(name: str) -> Callable[..., None]:
    def hint(self: Any, *args: Any, **options: Any) -> None:
        pass

    def refuse(self: Any, *args: Any, **options: Any) -> None:
        raise AuthoringError(
            f"{name} would change what an adopted model computes: call it on the FSDP2 model, before adopt"
        )

    return hint if name in _HINTS else refuse


for _name in set(vars(FSDPModule)) - set(vars(AdoptedModule)):
    if not _name.startswith("_"):
        setattr(AdoptedModule, _name, _method(_name))


@cache
def _with_methods(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (AdoptedModule, cls), {"__module__": cls.__module__})


def give_methods(unit: AdoptedUnit) -> None:
    """The hook "adopt.fsdp2_methods": called for each unit of a model that is adopted."""
    for module in unit.modules:
        module.__class__ = _with_methods(type(module))  # type: ignore[assignment, arg-type]
