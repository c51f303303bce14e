"""A grader of one lesson: a board's result or the same data typed by hand, and what is wrong in one way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workbench_lessons.l07_compile_everything.kernel_calls import calls_of

pytestmark = pytest.mark.integration


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
