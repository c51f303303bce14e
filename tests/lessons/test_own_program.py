"""What the lesson on the reader's own program shows, and whom its checkpoint passes."""

from types import SimpleNamespace

import pytest

from workbench.checks.verdicts import Outcome, Verdict
from workbench_lessons.l000_own_program.masks import kept, masks, measured

pytestmark = pytest.mark.integration


def report(before, after):
    evidence = {"masked": [before, after], "mask_bytes": [8 * before, 8 * after], "flop": [4, 2]}
    effect = Verdict("effect", Outcome.PASS, "", evidence)
    return SimpleNamespace(pass_row=lambda name: SimpleNamespace(verdict=lambda check: effect))


def test_a_batch_passes_only_if_every_attention_keeps_a_mask():
    assert [kept(report(*counts))[0] for counts in ((2, 2), (2, 1), (2, 0), (0, 0))] == [1, 0, 0, 0]
    assert kept(report(2, 1))[1] == "1 of 2 attentions read a mask after the pass"
    assert masks(report(2, 1)).rows[1] == ("bytes of these masks", 16, 8)


def test_the_recorded_steps_say_what_the_lesson_says():
    with_masks, without, peer = (float(row[1].removesuffix(" ms")) for row in measured().rows)
    assert with_masks > peer > without
