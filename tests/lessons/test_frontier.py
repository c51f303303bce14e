"""Points that no other beats, by hand."""

from __future__ import annotations

import pytest

from workbench_lessons.l03_split_forward_and_backward.pictures import frontier, unbeaten

POINTS = {"all": (8, 0), "some": (4, 0), "few": (4, 3), "none": (0, 6), "worse": (8, 6), "one": (2, 3)}


def test_a_point_is_unbeaten_where_no_other_is_as_good_in_both():
    assert unbeaten(POINTS) == ["none", "one", "some"]
    assert unbeaten({"a": (1, 1), "b": (1, 1)}) == ["a", "b"]  # equal points do not beat each other


def test_the_text_has_the_unbeaten_points_and_the_marked_ones():
    lines = frontier(POINTS, {"all": "as it is"}, "bytes", "FLOP").text.splitlines()
    assert lines == ["6 choices, 3 of them unbeaten", "none: 0 bytes, 6 FLOP", "one: 2 bytes, 3 FLOP",
                     "some: 4 bytes, 0 FLOP", "as it is (all): 8 bytes, 0 FLOP"]
    with pytest.raises(KeyError):
        frontier(POINTS, {"unknown": "?"}, "bytes", "FLOP")
