"""Scores of guesses and answers: closeness for numbers, equality for words. No torch here."""

from __future__ import annotations

import contextlib
import html
import math
import pkgutil
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from workbench.errors import WorkbenchError, no_exit

Figures = tuple[tuple[str, float, float], ...]  # name, what the answer has, the most it may have
Graded = tuple[float, str] | tuple[float, str, Figures]
LINE, LABEL, BAR, FILL = 26, 240, 360, "#7a8793"  # of the drawing, in pixels, and its bars


def percent(score: float) -> str:
    """A score in percent; a checkpoint that is not passed never shows 100%."""
    return "100%" if score >= 1 else f"{min(round(100 * score), 99)}%"


@dataclass(frozen=True)
class CheckResult:
    """A graded answer: score from 0 to 1, message, the hints so far, and figures with their limits."""

    name: str
    score: float
    message: str
    hints: tuple[str, ...] = ()
    figures: Figures = ()

    @property
    def passed(self) -> bool:
        return self.score >= 1

    def __str__(self) -> str:
        head = f"{self.name}: {percent(self.score)}" + (f", {self.message}" if self.message else "")
        return "\n".join([head, *(f"hint {i}: {h}" for i, h in enumerate(self.hints, 1))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = "".join(f"<div>{html.escape(line)}</div>" for line in str(self).splitlines())
        picture = b64encode(self._drawing().encode()).decode()
        said = f"{html.escape(self.name)}: {percent(self.score)}"
        return f'{text}<img alt="{said}" src="data:image/svg+xml;base64,{picture}">'

    def _drawing(self) -> str:
        """A bar for the score, and one for each figure, with a line at its limit. Limits of 0 share a scale."""
        rows = [("score", self.score, 1.0), *self.figures]
        common = max(
            (got for _, got, most in self.figures if not most and math.isfinite(got)), default=0
        )
        parts, longest = [], 0
        for i, (name, got, limit) in enumerate(rows):
            size = got if math.isfinite(got) else 0
            full = max(size, limit or common) or 1.0
            y, end = LINE * i + 5, LABEL + round(BAR * (max(size, 0) / full))
            mark = LABEL + round(BAR * (limit / full))
            says = (
                percent(got)
                if i == 0
                else f"{'✓' if got <= limit else '✗'} {got:,} (line: at most {limit:,})"
            )
            longest = max(longest, len(says))
            line = (
                f'<rect x="{mark - 1}" y="{y - 3}" width="2" height="22" fill="#222222"/>'
                if i
                else ""
            )
            parts.append(
                f'<text x="0" y="{y + 13}">{html.escape(name)}</text>'
                f'<rect x="{LABEL}" y="{y}" width="{BAR}" height="16" fill="#eeeeee"/>'
                f'<rect x="{LABEL}" y="{y}" width="{end - LABEL}" height="16" fill="{FILL}"/>'
                f'{line}<text x="{LABEL + BAR + 12}" y="{y + 13}">{says}</text>'
            )
        width, height = LABEL + BAR + max(220, 12 + 8 * longest), LINE * len(rows)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
            f'font-size="13"><rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>'
        )


@dataclass
class Prediction:
    """A guess, recorded before the answer is known. `guess` None: the reader did not guess. exact: right or wrong.

    evidence: what shows the answer, such as tables, pictures and reports; it is folded with the answer.
    """

    ask: str
    guess: Any = None
    truth: Any = None
    exact: bool = False
    evidence: tuple[Any, ...] = ()

    def score(self, truth: Any, *evidence: Any) -> Prediction:
        """Record the answer and what shows it; displaying the result shows the score."""
        self.truth, self.evidence = truth, evidence
        return self

    @property
    def points(self) -> float | None:
        """From 0 to 1; None without a guess or before the answer."""
        if self.guess is None or self.truth is None:
            return None
        return (
            exact(self.guess, truth=self.truth)[0]
            if self.exact
            else closeness(self.guess, self.truth)
        )

    def __str__(self) -> str:
        guess = "no guess" if self.guess is None else f"guessed {self.guess}"
        if self.truth is None:
            return f"{self.ask} {guess}"
        scored = "" if self.points is None else f", score {self.points:.0%}"
        if self.exact and self.points is not None:
            scored = f": {exact(self.guess, truth=self.truth)[1]}"
        return f"{self.ask} {guess}, it is {self.truth}{scored}"

    def __repr__(self) -> str:
        return "\n".join(
            [str(self), *(item if isinstance(item, str) else repr(item) for item in self.evidence)]
        )

    def _repr_html_(self) -> str:
        """The answer and its evidence are folded for a reader who has not guessed yet."""
        text = html.escape(str(self))
        below = "".join(f"<div>{_as_html(item)}</div>" for item in self.evidence)
        if self.guess is not None or self.truth is None:
            return f"<div>{text}</div>{below}"
        return (f"<details><summary>{html.escape(self.ask)} Guess, then open the answer.</summary>"
                f"{text}{below}</details>")


def _as_html(evidence: Any) -> str:
    """What shows the answer, as HTML: its own, lines for a text, or an image for a picture."""
    if isinstance(evidence, str):
        return f"<pre>{html.escape(evidence)}</pre>"
    if hasattr(evidence, "_repr_html_"):
        return evidence._repr_html_()
    picture = b64encode(evidence.png).decode()
    return (
        f'<img alt="{html.escape(evidence.alt)}" width="{evidence.width}" height="{evidence.height}" '
        f'src="data:image/png;base64,{picture}">'
    )


def closeness(guess: Any, truth: Any) -> float:
    """From 0 to 1: for numbers the smaller over the larger, for words 1 if they are equal."""
    if _number(guess) and _number(truth):
        if guess == truth:
            return 1.0
        if not (math.isfinite(guess) and math.isfinite(truth)) or guess * truth <= 0:
            return 0.0
        low, high = sorted((abs(guess), abs(truth)))
        return low / high
    if isinstance(guess, str) and isinstance(truth, str):
        return float(" ".join(guess.lower().split()) == " ".join(truth.lower().split()))
    return float(type(guess) is type(truth) and bool(guess == truth))


def exact(answer: Any, *, truth: Any) -> tuple[float, str]:
    """Asks for the exact truth: 1 or 0. The text of a number counts as the number.

    A mapping names facts, and the message lists those that differ.
    """
    if isinstance(truth, Mapping):
        wrong = [f"{name}: {_said(answer[name])}, wanted {_said(fact)}"
                 for name, fact in truth.items() if answer[name] != fact]
        return float(not wrong), "; ".join(wrong) or "right"
    if isinstance(answer, str) and _number(truth):
        with contextlib.suppress(ValueError):
            answer = float(answer.replace(",", ""))
    score, message = close(answer, truth=truth, within=0.0)
    return float(score >= 1), message


def by_slips(answer: Any, truth: float, slips: Mapping[str, float],
         grade: Callable[..., tuple[float, str]] = exact) -> tuple[float, str]:
    """Grades a number. slips: known wrong numbers by the message that names the mistake."""
    score, message = grade(answer, truth=truth)
    if score < 1:
        message = next(
            (said for said, slip in slips.items() if grade(answer, truth=slip)[0] >= 1), message
        )
    return score, message


def _said(fact: Any) -> str:
    """A number with commas between its thousands; a word as it is."""
    return f"{fact:,}" if _number(fact) else str(fact)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def close(answer: Any, *, truth: Any, within: float = 0.05) -> tuple[float, str]:
    """Grades a number by its distance from the truth, relative to it, or a word by equality."""
    score = closeness(answer, truth)
    if score >= 1 - within:
        return 1.0, "right"
    if _number(answer) and _number(truth):
        return score, f"too {'low' if answer < truth else 'high'}"
    return score, f"not {answer!r}"


def targets(answer: Mapping[str, float], *, at_most: Mapping[str, float],
            start: Mapping[str, float] | None = None) -> tuple[float, str, Figures]:
    """Asks that no figure of the reader's result exceeds its limit; a figure above it scores limit / figure.

    start: the figures of the answer as shipped, which scores 0. Those above their limit score by the way to it;
        a figure that it lacks met its limit.
    """
    if not isinstance(answer, Mapping) or not all(_number(answer.get(name)) for name in at_most):
        return 0.0, f"give a number for each of {', '.join(at_most)}", ()
    shares = {name: 1.0 if answer[name] <= limit else limit / answer[name] if answer[name] > limit else 0.0
              for name, limit in at_most.items()}  # NaN is neither
    missed = [
        f"{name} {answer[name]:,}, wanted at most {at_most[name]:,}"
        for name, s in shares.items()
        if s < 1
    ]
    figures = tuple((name, answer[name], limit) for name, limit in at_most.items())
    score = sum(shares.values()) / len(shares)
    if start and missed and (gaps := {name: start[name] - limit for name, limit in at_most.items()
                                      if start.get(name, limit) > limit}):
        way = [min(1.0, max(0.0, (start[name] - answer[name]) / gap)) for name, gap in gaps.items()]
        score = (
            sum(way)
            / len(way)
            * math.prod(share for name, share in shares.items() if name not in gaps)
        )
    return score, "; ".join(missed) or "every target met", figures


def by_cases(
    answer: Any, cases: Iterable[tuple[str, Any]], problem: Callable[[Any, Any], str], simplest: str
) -> tuple[float, str]:
    """Grades a function by its share of right cases, each of a kind and with what is given to the function.

    problem: of the answer and what is given, what is wrong, or "". A kind that is wrong once is wrong in all its cases;
    the message names the first. An answer that is wrong with the `simplest` kind scores 0.
    """
    wrong: dict[str, str] = {}
    kinds = []
    for kind, argument in cases:
        kinds.append(kind)
        if kind not in wrong and (said := problem(answer, argument)):
            wrong[kind] = said
    first = next(iter(wrong.items()), None)
    score = 0.0 if simplest in wrong else sum(kind not in wrong for kind in kinds) / len(kinds)
    return score, "right" if first is None else f"wrong with {first[0]}: {first[1]}"


def grade(check: str, answer: Any, context: Mapping[str, Any]) -> tuple[float, str, Figures]:
    """Run a grader: close, exact, targets, or "module:function". Raises WorkbenchError where there is none.

    A grader is `(answer, **context) -> (score, message)`, or `(score, message, figures)`.
    """
    try:
        grader = pkgutil.resolve_name(check if ":" in check else f"{__name__}:{check}")
    except (ImportError, AttributeError) as error:
        graders = "close, exact, targets, or workbench_lessons.module:function"
        raise WorkbenchError(f"check {check!r}: {error}: give one of {graders}") from None
    with no_exit():
        score, message, *figures = grader(answer, **context)
    return min(max(float(score), 0.0), 1.0), message, figures[0] if figures else ()
