"""The model families that a recipe can name: the package's, and those that users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.authoring.plans import AuthoringError, ParallelPlan, deepseek_v3_plan, llama3_plan
from workbench.recipe.model_sizes import SIZES
from workbench.recipe.plugins import known_on_ranks
from workbench.torch_api import determinism

if TYPE_CHECKING:
    from workbench.recipe.recipe import Recipe

Make = Callable[[Mapping[str, Any]], nn.Module]
PlanOf = Callable[[Mapping[str, Any], int], ParallelPlan]
OWN_FLAVOR = "debug"


@dataclass(frozen=True)
class Family:
    """`make(recipe)` builds the module, `plan(sizes, tp)` its plan. `sizes`: of a user's family, else None."""

    name: str
    make: Callable[[Recipe], nn.Module]
    plan: PlanOf
    sizes: Mapping[str, Any] | None = None


_PACKAGE: dict[str, tuple[str, str, PlanOf]] = {
    "llama3": ("llama3:Llama3Config", "llama3:Llama3", llama3_plan),
    "deepseek_v3": ("deepseek_v3:DeepSeekV3Config", "deepseek_v3:DeepSeekV3", deepseek_v3_plan),
}
"""The configuration and module, which are imported on use, and the plan of each of the package's families."""


def _code(name: str) -> Any:
    return resolve_name(f"workbench.authoring.models.{name}")


def model_config(recipe: Recipe) -> Any:
    """The configuration of the recipe's model: the flavor's sizes, unless the recipe gives others."""
    model, (config, _, _) = recipe.model, _PACKAGE[recipe.model.family]
    return _code(config)(
        **model.sizes(),
        attention=model.attention,
        mask=model.mask,
        document_token=model.document_token,
    )


def _of_package(recipe: Recipe) -> nn.Module:
    model: nn.Module = _code(_PACKAGE[recipe.model.family][1])(model_config(recipe))
    change, _, argument = recipe.model.loss.rpartition(":")
    return resolve_name(change)(model, recipe, argument) if change else model


_FAMILIES = {name: Family(name, _of_package, plan) for name, (_, _, plan) in _PACKAGE.items()}


def find_family(name: str) -> Family:
    """The family; AuthoringError with the known names."""
    if name not in _FAMILIES:
        raise AuthoringError(
            f"no model family {name!r} here: register it with @register_model, or use one of "
            f"{', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]


def register_model(
    name: str, *, sizes: Mapping[str, Any], plan: ParallelPlan | PlanOf | None = None
) -> Callable[[Make], Make]:
    """Register `make(sizes) -> module` as a family, so that recipes can set `model.family = name`.

    The module's forward takes (tokens, targets), each int64 (batch, seq), and returns the mean loss, a scalar;
    `CausalLM` wraps a model that returns logits. `sizes` has vocab_size, max_seq_len and whatever else `make` reads; a
    recipe may override the sizes that its model section knows. The module is built from the recipe's seed, the same on
    every rank. `plan`: where tensor parallelism cuts it, and what FSDP gathers together; or (sizes, tp) -> plan.
    Registering a name again replaces the family; the package's families cannot be replaced.
    """
    if missing := {"vocab_size", "max_seq_len"} - set(sizes):
        raise AuthoringError(
            f"model {name!r}: sizes has no {sorted(missing)[0]}, which batches need"
        )
    if name in _FAMILIES and _FAMILIES[name].sizes is None:
        raise AuthoringError(f"model {name!r} is the package's own family: choose another name")
    layout = plan if callable(plan) else lambda _sizes, _tp: plan or ParallelPlan()

    def register(make: Make) -> Make:
        def seeded(recipe: Recipe) -> nn.Module:
            with determinism.seeded(recipe.training.seed), torch.device("cpu"):
                return make(recipe.model.sizes())

        install_families([Family(name, seeded, layout, dict(sizes))])
        return make

    return register


def user_families() -> list[Family]:
    """The families that a user registered in this process."""
    return [f for f in _FAMILIES.values() if f.sizes is not None]


def install_families(families: list[Family]) -> None:
    """Register families that came from another process."""
    for family in families:
        SIZES[family.name] = {OWN_FLAVOR: dict(family.sizes or {})}
        _FAMILIES[family.name] = family


known_on_ranks("model", user_families, install_families)
