"""What authoring gives: a model on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.authoring.microbatches import cut
from workbench.authoring.plans import AuthoringError
from workbench.world.mesh import World, axis_sizes

if TYPE_CHECKING:
    from workbench.recipe.recipe import Recipe


@dataclass(frozen=True)
class Authored:
    """A model on a mesh, ready to be captured or to run eagerly.

    module: forward(tokens, targets) on this data-parallel rank's batch -> this rank's loss, a plain scalar tensor.
    buckets: module paths in forward order, by which passes group gathers: one path, or a list of paths in one bucket.
    groups: mesh axis to the name of its process group. recipe: None where the model came from `author_module`.
    expert_mesh: the mesh of the experts over the same ranks, or None. plain: the module before it was put on the mesh,
    on the meta device and in the dtype of the computation; None where it cannot be copied. deterministic: whether it is
    captured and proved with deterministic algorithms, or as the process has them.
    """

    module: nn.Module
    world: World
    mesh: DeviceMesh | None
    buckets: list[str | list[str]]
    groups: dict[str, str]
    recipe: Recipe | None = None
    batch: Callable[[], tuple[Any, ...]] | None = None
    expert_mesh: DeviceMesh | None = None
    plain: nn.Module | None = None
    deterministic: bool = True

    @property
    def axes(self) -> dict[str, int]:
        """Every mesh axis and its size; the axes of the experts come last."""
        return axis_sizes(self.expert_mesh) | axis_sizes(self.mesh)

    def example_batch(self) -> tuple[Any, ...]:
        """Inputs of the right shape on the world's device: fake, simulated for every rank, or this rank's batch."""
        if self.batch is None:
            raise AuthoringError("this model has no example batch: pass `batch=` to author_module")
        return self.batch()

    def microbatch(self) -> tuple[Any, ...]:
        """What is captured: the example batch, or the first microbatch of it where the recipe accumulates several."""
        return cut(
            self.example_batch(), 1 if self.recipe is None else self.recipe.training.accumulate
        )[0]
