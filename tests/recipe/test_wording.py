"""How the package says how many, and what went wrong."""

from __future__ import annotations

import json

import pytest

from workbench.recipe.wording import counted, first_line, json_text


@pytest.mark.parametrize(("count", "noun", "said"), [
    (1, "launch", "1 launch"), (2, "launch", "2 launches"), (0, "pass", "0 passes"), (1024, "rank", "1,024 ranks"),
])
def test_one_has_no_plural(count: int, noun: str, said: str) -> None:
    assert counted(count, noun) == said


def test_the_first_line_of_an_error_that_says_nothing_is_its_kind():
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(AssertionError()) == "AssertionError"


def test_data_with_a_number_that_is_not_finite_is_strict_json():
    def refuse(word):
        raise AssertionError(word)

    text = json_text({"relative": [float("inf"), -float("inf"), 0.5, (float("nan"), 3)], "at": {"x"}})
    assert json.loads(text, parse_constant=refuse) == {
        "relative": ["Infinity", "-Infinity", 0.5, ["NaN", 3]], "at": "{'x'}"}
