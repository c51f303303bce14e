"""Reports: what makes them ok, how ranks are merged, and what is shown."""

from typing import Any

import pytest

from workbench import Numerics, Recipe, Stage, WorkbenchError, load_recipe
from workbench.checks.verdicts import CHECKS, Outcome, Verdict
from workbench.graph.read.peak import StepPeak
from workbench.pipeline.build import refuse_no_effect
from workbench.pipeline.report import Expectation, PassRow, Peak, Report
from workbench.pipeline.report_text import NO_GRAPH, unchecked
from workbench.pipeline.roofline import roofline
from workbench.pipeline.run import check_expectations, merged, run
from workbench.pipeline.train import Training

PASS, FAIL, NO_EFFECT, UNKNOWN = Outcome.PASS, Outcome.FAIL, Outcome.NO_EFFECT, Outcome.UNKNOWN
UNSEEN = Verdict("numerics", UNKNOWN, "a fake world has no values: run on real ranks")


def row(*verdicts: Verdict, name: str = "reshard_after_forward", tolerance: float | None = None,
        **more: Any) -> PassRow:
    numerics = Numerics.EXACT if tolerance is None else Numerics.LOSSY
    return PassRow(name, Stage.JOINT, numerics, tolerance, 0.1, 0.01, list(verdicts), **more)


def report(*rows: PassRow, recipe: Recipe | None = None, **more: Any) -> Report:
    given: dict[str, Any] = {
        "recipe": recipe or load_recipe("tour"), "world": {"kind": "gloo", "size": 2, "axes": {"dp_shard": 2}},
        "level": "light", "machine": {}, "versions": {}, "seconds": {}, "passes": list(rows),
        "schedule": Verdict("collectives", PASS, "8 collectives in the same order on 2 ranks"),
        "pipeline": [], "saved_bytes": 1234,
        "roofline": roofline(1.5e6, "float32", 256, 3.5e11, 0.02),
        "training": Training([5.0, 4.0, 3.0], [2.0, 1.5, 1.0], [0.9, 0.02, 0.02], 256, None),
    }
    return Report(**given | more)


GOOD = [Verdict(c, PASS, f"{c} held") for c in CHECKS]


def test_ok_unless_something_failed() -> None:
    assert report(row(*GOOD)).ok
    assert report(row(UNSEEN)).ok
    failed = report(row(*GOOD[:-1], Verdict("numerics", FAIL, "output 3 differs")))
    assert failed.problems == ["reshard_after_forward: numerics: FAIL (output 3 differs)"]
    assert not report(row(*GOOD), schedule=Verdict("collectives", FAIL, "rank 1 differs")).ok
    assert not report(row(*GOOD), pipeline=[Verdict("numerics", FAIL, "against eager")]).ok
    missed = report(row(*GOOD), expectations=[Expectation("loss_falls", FAIL, "from 3 to 4")])
    assert missed.problems == ["expected loss_falls: from 3 to 4"]


def test_a_strict_build_is_refused_for_passes_that_are_idle_on_every_rank_without_leave() -> None:
    strict = load_recipe("tour").model_copy(update={"strict": True})
    idle = {"reshard_after_forward": "group size 1"}
    with pytest.raises(WorkbenchError, match="these passes had no effect: reshard_after_forward: group size 1"):
        refuse_no_effect(strict, [idle, idle])
    refuse_no_effect(strict, [idle, {}])  # it had one on rank 1
    refuse_no_effect(strict.override({"expect.no_effect": list(idle)}), [idle, idle])


def test_no_effect_fails_a_strict_recipe_alone() -> None:
    idle = row(*(v for v in GOOD if v.check != "effect"), Verdict("effect", NO_EFFECT, "group size 1"))
    assert report(idle).ok
    assert report(idle).idle == [("reshard_after_forward", "group size 1")]
    strict = load_recipe("tour").model_copy(update={"strict": True})
    assert report(idle, recipe=strict).problems == [
        "reshard_after_forward: NO_EFFECT, and the recipe is strict (group size 1)"]
    allowed = strict.override({"expect.no_effect": ["reshard_after_forward"]})
    assert report(idle, recipe=allowed).ok


def test_what_was_not_checked_says_why() -> None:
    callables = [v for v in GOOD if v.check in ("effect", "numerics")]
    assert unchecked([GOOD, callables], [], "level light") == {NO_GRAPH: ["lint", "collectives"]}
    shown = report(row(*GOOD[:3]), not_run="level light runs no graph").table()
    assert "not checked\n  numerics: level light runs no graph" in shown


def test_the_measured_peak_stands_beside_the_predicted_one() -> None:
    predicted = StepPeak(1000 << 20, 600 << 20, "backward", (("mm", 64 << 20, "layers.0"),))
    lines = report(peak=Peak(predicted, 1040 << 20)).table().splitlines()
    at = lines.index("peak memory: 1.02 GiB measured on rank 0, 0.98 GiB predicted, in the backward (-3.8%)")
    assert lines[at + 1].split() == ["0.062", "GiB", "mm", "layers.0"]


def test_the_gravest_rank_is_named() -> None:
    good, bad = Verdict("lint", PASS, "fine"), Verdict("lint", FAIL, "lost an output")
    ranks = [report(row(good), pipeline=[GOOD[-1]]), report(row(bad), pipeline=[GOOD[-1]])]
    whole = merged(ranks)
    assert whole.passes[0].verdict("lint") == Verdict("lint", FAIL, "rank 1: lost an output")
    assert whole.pipeline == [GOOD[-1]] and whole.schedule == ranks[0].schedule
    assert whole.roofline.flop_per_token == 2 * ranks[0].roofline.flop_per_token


def test_the_loss_falls_and_saved_bytes_are_expected() -> None:
    for losses, outcome in (([5.0, 4.0], PASS), ([4.0, 5.0], FAIL), ([5.0], UNKNOWN), ([5.0, 9.0, 9.0, 4.9], PASS)):
        training = Training(losses, losses, losses, 1, None)
        assert [e.outcome for e in check_expectations(load_recipe("tour"), training, 0)] == [outcome]
    recipe = load_recipe("llama3").override({"expect.max_saved_bytes": 100})
    assert check_expectations(recipe, None, 100)[0].outcome is PASS
    assert check_expectations(recipe, None, 101)[0].message == "101 bytes saved, at most 100"


def test_table() -> None:
    lossy = row(*GOOD, name="inductor_decomposition", tolerance=5e-6)
    idle = row(*GOOD[:1], Verdict("effect", NO_EFFECT, "no annotated node matched " * 6), UNSEEN)
    lines = report(lossy, idle).table().splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("norm-relative tolerance 5e-06" in line for line in lines) == 1
    assert lines[0] == "tour on 2 gloo ranks (dp_shard 2), level light"
    assert lines[-1] == "PASS, with 1 NO_EFFECT (numerics not checked)"
    assert "  numerics: a fake world has no values: run on real ranks" in lines
    assert "\033[33mNO_EFFECT\033[0m" in report(idle).table(color=True)
    page = report(row(*GOOD[:3], Verdict("numerics", PASS, "at most 2.2e-07"), name="<evil>"))._repr_html_()
    assert "2.2e-07" not in page and "tokens/s" not in page  # no measured figure
    assert "&lt;evil&gt;" in page and "<evil>" not in page


@pytest.mark.integration
def test_on_a_fake_world_nothing_is_claimed_and_flop_a_token_are_the_models() -> None:
    """Six for each weight that a token meets, and attention's: 2 matmuls forward, 4 backward, unmasked."""
    recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 2, "model.n_layers": 1})
    found = run(recipe, world="fake", level="full", progress=False)
    assert found.ok and found.training is None and found.step_seconds is None and found.peak.measured is None
    assert {r.verdict("numerics").outcome for r in found.passes} | {v.outcome for v in found.pipeline} == {UNKNOWN}
    assert found.roofline.ceiling is None and "fake" in found.roofline.reason
    s, seq = recipe.model.sizes(), recipe.data.seq_len
    head = s["dim"] // s["n_heads"]
    weights = s["dim"] * (2 * s["dim"] + 2 * s["n_kv_heads"] * head) + 3 * s["dim"] * s["ffn_dim"]
    weights += s["dim"] * s["vocab_size"]
    attention = s["n_heads"] * head * seq
    low, high = 6 * weights + 12 * attention, 6 * weights + 14 * attention  # the backward may repeat the scores
    assert low <= found.roofline.flop_per_token <= high
