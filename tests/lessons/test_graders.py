"""Graders of one lesson each: a board's result or the same data typed by hand, and what is wrong in one way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workbench_lessons.l07_compile_everything.kernel_calls import calls_of
from workbench_lessons.l08_replay_with_cudagraphs.whole_sum import whole_sum

pytestmark = pytest.mark.integration


def test_a_sum_that_lacks_little_is_told():
    assert [whole_sum(answer, truth=1000) for answer in (1000, "1,000", 996, 990, 1001)] == [
        (1, "right"), (1, "right"), (0, "almost: less than 1% is missing"), (0, "too low"), (0, "too high")]


def test_calls_of_nodes_are_asked_for_and_no_other():
    kinds = [(("a",), "extern"), (("b",), "cpp"), (("c", "a"), "cpp")]
    calls = [SimpleNamespace(number=i, nodes=nodes, kind=kind) for i, (nodes, kind) in enumerate(kinds)]
    graph = SimpleNamespace(graph="backward", kernels=calls)
    for answer, score, message in (
            (calls[::2], 1.0, "right"), ([0, 1, 2], 2 / 3, "1 of your 3 calls are not of it"),
            ([0], 0.5, "1 missing, among them every cpp call"),
            ([1], 0.0, "1 of your 1 calls are not of it; 2 missing"),
            ([7], 0.0, "give calls of the backward graph, or their numbers")):
        assert calls_of(answer, graph=graph, nodes={"a"}) == (score, message)
