"""From where a replay reads its inputs: the text holds no address."""

from __future__ import annotations

import pytest
from notebook.draw.test_kernels import Made, record

from workbench.errors import WorkbenchError
from workbench.graph.read.replay import Replay, ReplayInput
from workbench_lessons.l08_replay_with_cudagraphs import pictures
from workbench_lessons.l08_replay_with_cudagraphs.pictures import addresses


def test_where_a_replay_reads_its_inputs():
    picture = addresses(record(Made(0xABC)))
    assert picture.text == "addresses of the CUDA graphs\nforward: reads up.weight in place; copies primals_2"
    assert picture.png == addresses(record(Made(0xDEF))).png
    with pytest.raises(WorkbenchError, match="pass 'regional_inductor' records no CUDA graph"):
        addresses(record(print, name="regional_inductor"))
    with pytest.raises(WorkbenchError, match="62 inputs are too many"):
        addresses(record(*[Made(0xABC)] * 31))


def test_an_input_in_the_memory_of_an_earlier_graph_names_it(monkeypatch):
    def made(graph, *inputs):
        body = Made(None)
        body.graph, body.given = graph, tuple(ReplayInput(name, (3,), 24, *rest) for name, *rest in inputs)
        return body

    monkeypatch.setattr(Made, "facts", property(lambda b: Replay(b.graph, b.given, None, 1, "operators")))
    both = (made("forward", ("w", True, "up.weight"), ("buffer", True), ("x", False)),
            made("backward", ("w", True, "up.weight"), ("buffer", True), ("x", True), ("relu", True), ("t", False)))
    boxes = []
    monkeypatch.setattr(pictures, "_box", lambda axes, *where: boxes.append(where[4]))
    addresses(record(*both))
    assert [text for text in boxes if text != "copy"] == [
        "forward:\nCUDA graph", "results", "up.weight", "buffer", "x", "backward:\nCUDA graph", "results", "up.weight",
        "buffer", "x, forward's copy", "relu, forward's result", "t"]
