"""Graders of one number or one report: what each says of an answer that is wrong in one way."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.checks.verdicts import Outcome, Verdict
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l000_own_program.masks import failed, kept
from workbench_lessons.l05_bucket_and_overlap.link_costs import ModuleCosts, hides
from workbench_lessons.l09_route_tokens_to_experts.expert_slots import slot_bytes

pytestmark = pytest.mark.integration


def report(verdicts):
    row = SimpleNamespace(verdict=lambda check: verdicts[0], verdicts=verdicts)
    return SimpleNamespace(pass_row=lambda name: row)


@pytest.mark.parametrize(("before", "after", "score"), [(2, 2, 1), (2, 1, 0), (2, 0, 0), (0, 0, 0)])
def test_a_batch_passes_only_if_every_attention_keeps_a_mask(before, after, score):
    effect = Verdict("effect", Outcome.PASS, "", {"masked": [before, after]})
    assert kept(report([effect])) == (score, f"{after} of {before} attentions read a mask after the pass")


def test_the_checks_that_fail_are_counted():
    outcomes = {"lint": "PASS", "effect": "NO_EFFECT", "collectives": "FAIL", "numerics": "FAIL"}
    verdicts = [Verdict(name, Outcome[said], "why", {}) for name, said in outcomes.items()]
    assert failed(report(verdicts), "own_slice") == 2


def test_a_wrong_number_of_bytes_is_told_as_slots_of_each_expert() -> None:
    for answer, said in (("98,304", "right"), (8 * 12 * 512, "that is 6 slots for each of the 16 experts: too few"),
                         (16 * 23 * 512, "that is 23 slots for each of the 16 experts: too many"),
                         ("92,160", "that is 11.25 slots for each of the 16 experts: not a whole number"),
                         (math.inf, "too high"), ("many", "not 'many'")):
        assert slot_bytes(answer, experts=16, rows=192, size=192 * 512) == (float(said == "right"), said)


def test_the_hint_names_what_was_forgotten() -> None:
    reacts = load_lesson("05_bucket_and_overlap").checkpoint("tokens_to_hide").reacts
    spec: Any = SimpleNamespace(profile=SimpleNamespace(errors={"compute": 0.05}))
    layer = ModuleCosts(flop=6e9, matmul_ms=1.0, gather_ms=5.0, scatter_ms=5.0, sent_bytes=8e6)
    layer = replace(layer, flop=7.5 * layer.sent_bytes / layer.sent_ms * 1e3)  # so that the law says 7,500
    for answer, said in ((30_000, "about three times the tokens"), (5_000, "tokens for the gathers alone"),
                         (1, "too low"), (7_500, "a weight that is gathered once"), (10_000, "right")):
        score, message = hides(answer, layer=layer, tokens=1_000, spec=spec)
        assert (message, score >= 1) == (said, said == "right")
        assert sum(words in said for words in reacts) == (said != "right")
