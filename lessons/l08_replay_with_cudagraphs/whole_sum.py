"""A grader: an exact sum."""

from __future__ import annotations

from typing import Any

from workbench.notebook.lessons.grading import closeness, exact


def whole_sum(answer: Any, *, truth: Any) -> tuple[float, str]:
    """Asks for the exact sum. The message tells a sum that lacks less than 1% from one that lacks more."""
    score, message = exact(answer, truth=truth)
    nearly = message == "too low" and closeness(answer, truth) > 0.99
    return score, "almost: less than 1% is missing" if nearly else message
