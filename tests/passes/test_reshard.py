"""reshard_after_forward: gathered weights are freed, through any chain of views, or kept."""

from __future__ import annotations

import pytest
from on_ranks import small

from workbench.authoring.author import author
from workbench.checks.verdicts import Outcome
from workbench.graph.capture import capture
from workbench.graph.gather_chains import gather_chains
from workbench.graph.read.memory import parameter_gathers
from workbench.pipeline.run_passes import run_joint, saved_bytes
from workbench.recipe.sections import PassSpec

pytestmark = pytest.mark.integration

NAME = "reshard_after_forward"
ALWAYS, NEVER = PassSpec(name=NAME), PassSpec(name=NAME, options={"policy": "never"})


def test_always_gathers_again_and_frees_and_never_gathers_nothing_again(two_layers, through):
    records, pair, joint = through(two_layers, [ALWAYS])
    parameters = len(list(gather_chains(joint)))
    assert parameters == 2 * 9 + 3
    found = records[NAME].verdict("effect")
    assert found.outcome is Outcome.PASS and found.evidence["saved_gathered_parameters"] == []
    # the embedding's rows are read and not multiplied: its gradient needs no weight
    assert len(parameter_gathers(pair.backward)) == found.evidence["gathers_in_backward"] == parameters - 1
    records, never, _ = through(two_layers, [NEVER])
    assert records[NAME].verdict("effect").outcome is Outcome.PASS
    assert parameter_gathers(never.backward) == [] and saved_bytes(never) > saved_bytes(pair)


def test_after_checkpointing_both_hold(two_layers, through):
    for policy in (ALWAYS, NEVER):
        records, pair, _ = through(two_layers, ["activation_checkpointing", policy])
        assert {r.outcome for r in records.values()} == {Outcome.PASS}
    assert parameter_gathers(pair.backward) == []


def test_no_parameter_is_gathered_has_its_reason(fake4):
    authored = author(small({"tp": 4}, layers=1).override({"model.n_kv_heads": 4, "model.n_heads": 4}), fake4)
    with capture(authored) as joint:
        record = run_joint(joint, [NAME])[0]
    effect = record.verdict("effect")
    assert effect is not None and effect.message == "no parameter is gathered in this graph"
