"""What the lesson on the reader's own program shows, and whom its checkpoint passes."""

from types import SimpleNamespace

import pytest

from workbench.checks.verdicts import Outcome, Verdict
from workbench_lessons.l000_own_program.masks import MASK_BYTES, failed, kept, masks

pytestmark = pytest.mark.integration


def report(before, after):
    evidence = {"masked": [before, after], "mask_bytes": [MASK_BYTES * before, MASK_BYTES * after], "flop": [4, 2]}
    effect = Verdict("effect", Outcome.PASS, "", evidence)
    return SimpleNamespace(pass_row=lambda name: SimpleNamespace(verdict=lambda check: effect))


def test_a_batch_passes_only_if_every_attention_keeps_a_mask():
    assert [kept(report(*counts))[0] for counts in ((2, 2), (2, 1), (2, 0), (0, 0))] == [1, 0, 0, 0]
    assert kept(report(2, 1))[1] == "1 of 2 attentions read a mask after the pass"
    assert [row[1:] for row in masks(report(2, 1)).rows[:2]] == [(2, 1), (2 * MASK_BYTES, MASK_BYTES)]


def test_the_checks_that_fail_are_counted():
    verdicts = [Verdict(name, getattr(Outcome, said), "why", {}) for name, said in (
        ("lint", "PASS"), ("effect", "NO_EFFECT"), ("collectives", "FAIL"), ("numerics", "FAIL"))]
    assert failed(SimpleNamespace(pass_row=lambda name: SimpleNamespace(verdicts=verdicts)), "own_slice") == 2
