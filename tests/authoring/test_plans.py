"""Plans: patterns, and messages for those that match nothing."""

import pytest
import torch

from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.authoring.plans import LLAMA3_PLAN, AuthoringError, ParallelPlan, expand_units, matching

PATHS = ["", "embed", "layers", "layers.0", "layers.1", "layers.1.mlp", "norm", "output"]


def test_units_expand_in_forward_order_and_one_that_matches_nothing_is_named():
    plan = ParallelPlan(units=("embed", "layers.*", ("norm", "output")))
    assert expand_units(plan, PATHS) == ["embed", "layers.0", "layers.1", ["norm", "output"]]
    with pytest.raises(AuthoringError, match=r"unit 'blocks\.\*' matches no module; modules are embed, layers"):
        expand_units(ParallelPlan(units=("blocks.*",)), PATHS)


def test_the_llama3_plan_covers_every_parameter_once():
    with torch.device("meta"):
        model = Llama3(Llama3Config())
    paths = [path for path, _ in model.named_modules()]
    cut = {path for pattern in LLAMA3_PLAN.tensor for path in matching(pattern, paths)}
    owners = {path for path, part in model.named_modules() if list(part.parameters(recurse=False))}
    assert owners <= cut
    units = [name for unit in expand_units(LLAMA3_PLAN, paths) for name in ([unit] if isinstance(unit, str) else unit)]
    assert len(units) == len(set(units))
    assert {name for name, _ in model.named_parameters()} == {
        f"{unit}.{name}" for unit in units for name, _ in model.get_submodule(unit).named_parameters()
    }
