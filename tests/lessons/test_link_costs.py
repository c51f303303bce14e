"""The grader of the tokens that hide collectives, on a layer with round figures."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l05_bucket_and_overlap.link_costs import ModuleCosts, hides

LESSON = "05_bucket_and_overlap"


def hints(checkpoint: str, said: str) -> int:
    """How many of the lesson's hints react to what a grader says."""
    return len([words for words in load_lesson(LESSON).checkpoint(checkpoint).reacts if words in said])


def test_the_hint_names_what_was_forgotten() -> None:
    spec: Any = SimpleNamespace(profile=SimpleNamespace(errors={"compute": 0.05}))
    layer = ModuleCosts(flop=6e9, matmul_ms=1.0, gather_ms=5.0, scatter_ms=5.0, sent_bytes=8e6)
    layer = replace(layer, flop=7.5 * layer.sent_bytes / layer.sent_ms * 1e3)  # so that the law says 7,500
    for answer, said in ((30_000, "about three times the tokens"), (5_000, "tokens for the gathers alone"),
                         (1, "too low"), (7_500, "a weight that is gathered once"), (10_000, "right")):
        score, message = hides(answer, layer=layer, tokens=1_000, spec=spec)
        assert (message, score >= 1) == (said, said == "right")
        assert hints("tokens_to_hide", said) == (said != "right")
