from workbench.checks.effect import verdict
from workbench.checks.verdicts import Outcome
from workbench.passes.effect import Effect


def test_an_effect_that_happened_passes_with_its_evidence():
    assert verdict(Effect(True, "", {"launches": [10, 2]})).evidence == {"launches": [10, 2]}
    assert verdict(Effect(True)).outcome is Outcome.PASS


def test_a_pass_that_matched_nothing_says_why():
    found = verdict(Effect(False, "no module path matched 'layers.*'"))
    assert (found.outcome, found.message) == (Outcome.NO_EFFECT, "no module path matched 'layers.*'")
    assert verdict(Effect(False)).message
