"""Scores of guesses and answers: closeness for numbers, equality for words. No torch here."""

from __future__ import annotations

import contextlib
import html
import importlib
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from workbench.errors import WorkbenchError, no_exit

Figures = tuple[tuple[str, float, float], ...]  # name, what the answer has, the most it may have
Graded = tuple[float, str] | tuple[float, str, Figures]
Grader = Callable[..., float | bool | Graded]
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
            [str(self), *(each if isinstance(each, str) else repr(each) for each in self.evidence)]
        )

    def _repr_html_(self) -> str:
        """The answer and its evidence are folded for a reader who has not guessed yet."""
        text = html.escape(str(self))
        below = "".join(f"<div>{_as_html(each)}</div>" for each in self.evidence)
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
    if type(guess) is not type(truth):
        return 0.0
    try:
        return float(bool(guess == truth))
    except (RuntimeError, ValueError):  # tensors and arrays compare element by element
        return float(guess.shape == truth.shape and bool((guess == truth).all()))


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


def told(answer: Any, truth: float, slips: Mapping[str, float],
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


def equal(answer: Any, *, truth: Any) -> tuple[float, str]:
    """Asks for the exact truth; a wrong number still scores its closeness."""
    return close(answer, truth=truth, within=0.0)


def first_of(answer: Any, *, truth: str, order: Sequence[str]) -> tuple[float, str]:
    """Asks for the first node whose value is wrong. order: the names of all nodes, as they run. A node is its name."""
    name = str(getattr(answer, "name", answer)).strip()
    if name not in order:
        return 0.0, f"no node {name!r} in the graph"
    if name == truth:
        return 1.0, "right"
    early = order.index(name) < order.index(truth)
    return (
        0.0,
        f"the value of {name!r} is still right"
        if early
        else f"the first wrong value comes before {name!r}",
    )


def whole_sum(answer: Any, *, truth: Any) -> tuple[float, str]:
    """Asks for the exact sum. The message tells a sum that lacks less than 1% from one that lacks more."""
    score, message = exact(answer, truth=truth)
    nearly = message == "too low" and closeness(answer, truth) > 0.99
    return score, "almost: less than 1% is missing" if nearly else message


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


def calls_of(answer: Any, *, graph: Any, nodes: set[str]) -> tuple[float, str]:
    """Asks for the kernel calls of a graph that compute any of the nodes, and for no other. graph: its `Kernels`.

    The message names a kind of call that the answer lacks altogether.
    """
    numbers = {k.number for k in graph.kernels}
    try:
        chosen = {getattr(k, "number", k) for k in answer}
    except TypeError:
        chosen = {None}
    if not chosen <= numbers:
        return 0.0, f"give calls of the {graph.graph} graph, or their numbers"
    wanted = {k.number for k in graph.kernels if nodes & {*k.nodes}}
    other, missing = len(chosen - wanted), len(wanted - chosen)
    stray = f"{other} of your {len(chosen)} calls are not of it"
    kinds = {k.number: k.kind for k in graph.kernels}
    lacks = {kinds[n] for n in wanted} - {kinds[n] for n in chosen & wanted}
    none_of = (
        f", among them every {' and every '.join(sorted(lacks))} call"
        if lacks and chosen & wanted
        else ""
    )
    parts = [
        text for count, text in ((other, stray), (missing, f"{missing} missing{none_of}")) if count
    ]
    return len(chosen & wanted) / max(1, len(chosen | wanted)), "; ".join(parts) or "right"


def by_cases(
    answer: Any, cases: Iterable[tuple[str, Any]], problem: Callable[[Any, Any], str], simplest: str
) -> tuple[float, str]:
    """Grades a function by its share of right cases, each of a kind and with what is given to the function.

    problem: of the answer and what is given, what is wrong, or "". A kind that is wrong once is wrong in all its cases;
    the message names the first. An answer that is wrong with the `simplest` kind scores 0.
    """
    wrong: dict[str, str] = {}
    kinds = []
    for kind, given in cases:
        kinds.append(kind)
        if kind not in wrong and (said := problem(answer, given)):
            wrong[kind] = said
    first = next(iter(wrong.items()), None)
    score = 0.0 if simplest in wrong else sum(kind not in wrong for kind in kinds) / len(kinds)
    return score, "right" if first is None else f"wrong with {first[0]}: {first[1]}"


GRADERS: dict[str, Grader] = {
    each.__name__: each for each in (close, equal, exact, first_of, targets, whole_sum)
}
"""`(answer, **context) -> score | (score, message[, figures])` by the names that lessons use."""


def grade(check: str, answer: Any, context: Mapping[str, Any]) -> tuple[float, str, Figures]:
    """Run a grader by its name or "module:function". Raises WorkbenchError where there is none."""
    grader = GRADERS.get(check)
    if grader is None and ":" in check:
        module, function = check.split(":")
        try:
            grader = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as exc:
            raise WorkbenchError(f"check {check!r}: {exc}") from None
    if grader is None:
        raise WorkbenchError(
            f"no check {check!r}: one of {', '.join(GRADERS)}, or workbench_lessons.module:function"
        )
    with no_exit():
        result = grader(answer, **context)
    given = result if isinstance(result, tuple) else (result, "right" if result >= 1 else "not yet")
    return min(max(float(given[0]), 0.0), 1.0), given[1], given[2] if len(given) > 2 else ()
