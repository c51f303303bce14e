"""Pictures and tables of kernels and replays: their text holds counts and names, and neither address nor path."""

from __future__ import annotations

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
from workbench.passes.registry import find_pass
from workbench.pipeline.run_passes import PassRecord

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


def record(*after, name="cudagraph"):
    graph = symbolic_trace(torch.nn.ReLU())
    return PassRecord(find_pass(name), None, (Body(print, graph, StepFacts()),) * len(after), after, 0, 0)


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


def test_other_passes_are_refused_by_name():
    with pytest.raises(WorkbenchError, match="pass 'regional_inductor' records no CUDA graph"):
        draw.replay(record(print, name="regional_inductor"))
    with pytest.raises(WorkbenchError, match="pass 'cudagraph' has no kernels of Inductor"):
        draw.kernels(record(print))
