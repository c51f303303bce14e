"""What "Two captures" looks up in a graph."""

from __future__ import annotations

import torch
from torch import nn

from workbench import author_module, capture, fake_world, provenance
from workbench.graph.capture import JointGraph
from workbench_lessons.l17_two_captures.two_captures import wrong_modules


class Summed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def captured(by: str) -> JointGraph:
    with fake_world(1) as world:
        layers = Summed(nn.Linear(4, 8, bias=False), nn.SiLU(), nn.Linear(8, 4, bias=False))
        return capture(author_module(layers, world, None, batch=lambda: (torch.empty(2, 4),)), by=by)


def test_a_wrong_module_and_a_missing_one_are_counted_apart() -> None:
    gm = captured("traced").graph
    right = {n.name: provenance(n).module for n in gm.graph.nodes if n.op == "call_function" and provenance(n).backward}
    none = {"nodes with another module": 0, "nodes without an entry": 0}
    assert wrong_modules(gm, right) == (none, "")
    first = next(name for name, module in right.items() if module)
    assert wrong_modules(gm, right | {first: "elsewhere"}) == (
        none | {"nodes with another module": 1}, f"first wrong node: {first}, and the answer says 'elsewhere'")
    assert wrong_modules(gm, {name: right[name] for name in right if name != first})[0] == (
        none | {"nodes without an entry": 1})
