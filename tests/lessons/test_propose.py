"""A contract is read off a run of a user's own pass: bitwise, near, or none."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from on_ranks import calls, insert, small, user_pass

from workbench import WorkbenchError
from workbench.recipe.contracts import CONTRACTS, Numerics
from workbench_lessons.l11_write_your_own_pass.propose import propose_contract

pytestmark = pytest.mark.ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RECIPE = small({"dp_shard": 2})


def drop_idle_views(gm):
    for view in calls(gm, "aten.view"):
        if view.meta["val"].shape == view.all_input_nodes[0].meta["val"].shape:
            view.replace_all_uses_with(view.all_input_nodes[0])
            gm.graph.erase_node(view)
    return gm


def scaled(factor):
    def scale(gm):
        norm = calls(gm, "aten.rsqrt")[0]
        more = insert(gm, norm, torch.ops.aten.mul.Tensor, norm, factor)
        norm.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
        return gm

    return scale


def test_a_bitwise_pass_is_exact_and_what_it_drops_is_counted(pool2):
    with user_pass("own", drop_idle_views, numerics="lossy", tolerance=1e-3) as name:
        found = propose_contract(name, RECIPE, world=pool2)
        assert CONTRACTS[name].numerics is Numerics.LOSSY  # what was stated stays
    assert found.contract.numerics is Numerics.EXACT and found.worst == 0.0
    assert set(found.changed) == {"aten.view"} and found.changed["aten.view"] < 0
    views = -found.changed["aten.view"]
    assert repr(found) == (f'@register_pass("own", stage="joint", numerics="exact",\n'
                           f'               changes="{views} fewer aten.view")\n# on 2 ranks: bitwise')


def test_a_rounding_is_lossy_with_room_above_what_was_seen_and_what_does_nothing_is_refused(pool2):
    with user_pass("own", scaled(1 + 1e-6)) as name:
        found = propose_contract(name, RECIPE, world=pool2)
    assert found.contract.numerics is Numerics.LOSSY
    assert 0.0 < found.worst < found.contract.tolerance < 1e-4
    idle = user_pass("own", lambda gm: gm)
    with idle as name, pytest.raises(WorkbenchError, match="pass 'own' did nothing to recipe 'small'"):
        propose_contract(name, RECIPE, world=pool2)
