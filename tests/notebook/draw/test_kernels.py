"""Pictures and tables of kernels and replays: their text holds counts and names, and neither address nor path."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.fx import symbolic_trace

from workbench.errors import WorkbenchError
from workbench.graph.callables import Body
from workbench.graph.facts import StepFacts
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.graph.read.replay import Replay, ReplayInput
from workbench.notebook import draw
from workbench.notebook.draw.kernels import MOST
from workbench.passes.cudagraph import Replayed
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.contracts import Stage

SOURCE = '#include "/tmp/someone/prefix.h"\n#include <cmath>\nvoid kernel() {}\n'


def made(graph="forward", fused=3, missing=()):
    kernels = [Kernel(0, "torch.ops.all_gather", "collective", ("gather",)),
               Kernel(1, "torch.ops.wait", "wait", ("w",))]
    kernels += [Kernel(i + 2, f"cpp_{i}", "cpp", (f"a{i}", f"b{i}"), (), ("layers.0", "layers.1", "norm"),
                       ("llama3.py:9",), SOURCE) for i in range(fused)]
    nodes = tuple(n for k in kernels for n in k.nodes)
    return Kernels(graph, tuple(kernels), (*nodes, "lost"), not_found=("lost",), missing=missing)


def test_bars_of_both_directions():
    picture = draw.kernels([made(), made("backward", 1, ("the code",))])
    assert picture.text.splitlines() == [
        "kernels",
        "forward: 9 nodes, 5 calls (3 cpp, 1 collective, 1 wait); 6 nodes in 3 generated kernels; 0 views in none; "
        "0 taken out by Inductor's passes; not found: lost",
        "  cpp: 3 calls of 3 kernels, 6 nodes",
        "  collective: 1 calls of 1 kernels, 1 nodes",
        "backward: 5 nodes, 3 calls (1 cpp, 1 collective, 1 wait); 2 nodes in 1 generated kernels; 0 views in none; "
        "0 taken out by Inductor's passes; not found: lost; missing: the code",
        "  cpp: 1 calls of 1 kernels, 2 nodes",
        "  collective: 1 calls of 1 kernels, 1 nodes",
    ]
    assert picture.png.startswith(b"\x89PNG") and "lost" in picture.alt


def test_many_kernels_are_folded_with_their_count():
    assert "  not drawn: 9 more calls, 18 nodes" in draw.kernels(made(fused=MOST + 8)).text.splitlines()
    assert "not drawn" not in draw.kernels(made(fused=MOST - 1)).text


def test_a_row_a_call_and_names_in_the_html_only():
    table = draw.kernel_table([made(), made("backward", 1)])
    assert [row[2] for row in table.rows if row[0] == "forward"] == ["all_gather", "wait", "cpp_0", "cpp_1",
                                                                      "cpp_2"]
    assert "layers.0, layers.1 and 1 more  llama3.py:9" in repr(table)
    assert "a1, b1" in table._repr_html_() and "a1" not in repr(table)
    one = draw.kernel_table(made(), kind="wait")
    assert [row[0] for row in one.rows] == [1] and not {"graph", "kind"} & {*one.columns}
    assert [row[0] for row in draw.kernel_table(made(), nodes={"a1", "w"}).rows] == [1, 3]


def record(*after, name="cudagraph"):
    graph = symbolic_trace(torch.nn.ReLU())
    return PassRecord(name, Stage.REPLAY, None, (Body(print, graph, StepFacts()),) * len(after), after, 0, 0)


class Made(Replayed):
    def __init__(self, address):
        self.address = address

    @property
    def facts(self):
        inputs = (ReplayInput("primals_1", (4, 8), 128, True, "up.weight", self.address),
                  ReplayInput("primals_2", (3,), 24, False))
        return Replay("forward", inputs, 4096, 17, "calls of kernels", 3)


def test_inputs_of_a_replay_and_no_address_in_the_text():
    table = draw.replay(record(Made(0xABC)))
    assert [row[3] for row in table.rows] == ["static", "copied"]
    assert table.notes == ("forward: 1 input static (128 bytes), 1 input copied (24 bytes); pool 4,096 bytes; "
                           "17 calls of kernels before, 1 launch after",)
    assert "0xabc" in table._repr_html_() and "address" not in repr(table) and "0xabc" not in repr(table)
    assert repr(table) == repr(draw.replay(record(Made(0xDEF))))


def test_where_a_replay_reads_its_inputs():
    picture = draw.addresses(record(Made(0xABC)))
    assert picture.text == "addresses of the CUDA graphs\nforward: reads up.weight in place; copies primals_2"
    assert picture.png == draw.addresses(record(Made(0xDEF))).png
    with pytest.raises(WorkbenchError, match="pass 'regional' records no CUDA graph"):
        draw.addresses(record(print, name="regional"))
    with pytest.raises(WorkbenchError, match="62 inputs are too many"):
        draw.addresses(record(*[Made(0xABC)] * 31))


def test_an_input_in_the_memory_of_an_earlier_graph_names_it(monkeypatch):
    def made(graph, *inputs):
        body = Made(None)
        body.graph, body.given = graph, tuple(ReplayInput(name, (3,), 24, *rest) for name, *rest in inputs)
        return body

    monkeypatch.setattr(Made, "facts", property(lambda b: Replay(b.graph, b.given, None, 1, "operators")))
    both = (made("forward", ("w", True, "up.weight"), ("buffer", True), ("x", False)),
            made("backward", ("w", True, "up.weight"), ("buffer", True), ("x", True), ("relu", True), ("t", False)))
    boxes = []
    monkeypatch.setattr(sys.modules[draw.addresses.__module__], "_box", lambda axes, *where: boxes.append(where[4]))
    draw.addresses(record(*both))
    assert [text for text in boxes if text != "copy"] == [
        "forward:\nCUDA graph", "results", "up.weight", "buffer", "x", "backward:\nCUDA graph", "results", "up.weight",
        "buffer", "x, forward's copy", "relu, forward's result", "t"]


def test_other_passes_are_refused_by_name():
    with pytest.raises(WorkbenchError, match="pass 'regional' records no CUDA graph"):
        draw.replay(record(print, name="regional"))
    with pytest.raises(WorkbenchError, match="pass 'cudagraph' has no kernels of Inductor"):
        draw.kernels(record(print))
