"""How the package says how many, and what went wrong."""

import json

from workbench.recipe.wording import counted, first_line, json_text


def test_one_has_no_plural_and_an_error_that_says_nothing_is_its_kind() -> None:
    assert [counted(1, "launch"), counted(0, "pass"), counted(1024, "rank")] == ["1 launch", "0 passes", "1,024 ranks"]
    assert first_line(ValueError("one\ntwo")) == "one" and first_line(AssertionError()) == "AssertionError"


def test_data_with_a_number_that_is_not_finite_is_strict_json():
    def refuse(word):
        raise AssertionError(word)

    text = json_text({"relative": [float("inf"), -float("inf"), 0.5, (float("nan"), 3)], "at": {"x"}})
    assert json.loads(text, parse_constant=refuse) == {
        "relative": ["Infinity", "-Infinity", 0.5, ["NaN", 3]], "at": "{'x'}"}
