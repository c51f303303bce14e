"""What "Two captures" looks up in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from workbench import WorkbenchError, author_module, capture, cut, fake_world, find_nodes, partition, provenance
from workbench.graph.capture import JointGraph
from workbench_lessons.l17_two_captures.two_captures import count_kept, readers, refused_by, wrong_modules


class Summed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


class Decides(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).sum()
        return y if y > 0 else -y


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls * super().forward(x).sum()


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


def test_the_readers_of_a_saved_tensor_are_found_behind_its_views() -> None:
    joint, traced = partition(captured("joint")), cut(captured("traced"))
    assert readers(traced.graphs[1], "mm") == readers(joint.graphs[1], "mm") == ["silu_backward"]


def test_an_operator_that_the_backward_repeats_is_marked() -> None:
    joint = captured("joint")
    for node in find_nodes(joint.graph, op="silu"):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert "silu, again" in readers(partition(joint).backward, "mm")


@pytest.mark.parametrize(("by", "of_torch"), [("joint", "Dynamo"), ("traced", "make_fx")])
def test_a_refusal_has_an_author_and_a_reason_without_the_advice(by: str, of_torch: str) -> None:
    with fake_world(1) as world:
        for layer, who, why in ((Decides(), of_torch, "depends on a tensor's value"),
                                (Counts(), "the workbench", "its attribute 'calls' in its forward")):
            module = author_module(layer, world, None, batch=lambda: (torch.empty(2, 4),))
            with pytest.raises(WorkbenchError) as refused:
                capture(module, by=by)
            author, reason = refused_by(refused.value, by)
            assert author == who and why in reason
            assert "torch.where" not in reason and "add_" not in reason and ".py" not in reason


def test_a_count_scores_by_what_takes_it_and_only_if_eager_pytorch_counts() -> None:
    wanted, takes = [2.0, 4.0, 6.0], {"joint": "", "traced": ""}
    assert count_kept(wanted, of_graph=wanted, refused=takes, wanted=wanted) == (1.0, "right")
    assert count_kept(wanted, of_graph=[2.0, 2.0, 2.0], refused=takes, wanted=wanted) == (
        2 / 3, "wrong losses of the traced graph: 2")
    assert count_kept(wanted, of_graph=wanted, refused=takes | {"joint": "it assigns"}, wanted=wanted) == (
        2 / 3, "the joint capture refuses it: it assigns")
    assert count_kept(wanted, of_graph=None, refused=dict.fromkeys(takes, "no"), wanted=wanted) == (
        0.0, "the joint capture refuses it: no; the traced capture refuses it: no; so no traced graph was run")
    assert count_kept([0.0, 2.0, 4.0], of_graph=wanted, refused=takes, wanted=wanted) == (
        0.0, "wrong losses in eager PyTorch: 3")
