"""A whole step that is joined of a traced capture: needs both folders of the lab."""

from __future__ import annotations

import pytest
from on_ranks import calls, user_pass

from lab.whole_step.whole_steps import whole
from workbench import build, fake_world
from workbench.lab.traced_capture.cut import AGAIN

pytestmark = pytest.mark.integration
FULL = {"name": "activation_checkpointing", "policy": "full"}


def test_the_join_keeps_what_a_traced_backward_repeats():
    with fake_world(2) as world:
        built = [build(whole({"dp_shard": 2}, joint, (), capture="traced"), world) for joint in ((), (FULL,))]
    plain, repeated = (len(calls(each.step.split.graph, "aten.mm")) for each in built)
    assert repeated > plain


def merges(gm):
    """What a common-subexpression elimination would do to the first repeated product."""
    node = next(n for n in calls(gm, "aten.mm") if AGAIN in n.meta)
    first = next(n for n in calls(gm, "aten.mm") if n.name == node.meta[AGAIN])
    node.replace_all_uses_with(first)
    gm.graph.erase_node(node)
    return gm


@pytest.mark.parametrize(("edit", "outcome"), [
    (merges, "FAIL"), pytest.param(lambda gm: gm, "PASS", marks=pytest.mark.nightly)])
def test_a_pass_that_merges_a_repeat_with_the_forward_is_named(edit, outcome):
    with user_pass("own", edit, stage="step"), fake_world(2) as world:
        built = build(whole({"dp_shard": 2}, (FULL,), ("own",), capture="traced"), world)
    assert built.pipeline[0].outcome == outcome
    if outcome == "FAIL":
        assert "pass 'own' dropped 1 product or attention that the backward repeats" in built.pipeline[0].message
