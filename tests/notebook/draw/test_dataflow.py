"""A small graph's boxes and arrows: what crosses from the forward to the backward, and what a view stands for."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache

import pytest
import torch
from torch import nn

from workbench import WorkbenchError, author, author_module, capture, fake_world, load_recipe
from workbench.graph.capture import JointGraph
from workbench.notebook import draw

pytestmark = pytest.mark.integration


class Summed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


@cache
def captured(ranks: int) -> JointGraph:
    module = Summed(OrderedDict(up=nn.Linear(4, 8, bias=False), relu=nn.ReLU(), down=nn.Linear(8, 4, bias=False)))
    with fake_world(ranks) as world:
        mesh = world.mesh_of({"dp_shard": ranks}) if ranks > 1 else None
        return capture(author_module(module, world, mesh, batch=lambda: (torch.empty(2, 4),)))


def test_the_arrows_across_are_what_the_backward_reads() -> None:
    head, *across = draw.dataflow(captured(1).graph, "one rank").text.splitlines()
    assert head.startswith("one rank: ") and head.endswith(f"{len(across)} arrows from forward to backward")
    assert set(across) == {"relu > mm_2", "t_1 > t_4", "detach > detach_1", "primals_3 > mm_4"}


def test_without_views_the_readers_read_the_owner_of_the_memory() -> None:
    _, *across = draw.dataflow(captured(2).graph, views=False).text.splitlines()
    assert set(across) == {"relu > mm_2", "all_gather_into_tensor_1 > mm_3", "relu > threshold_backward",
                           "primals_5 > mm_4"}


def test_boxes_can_have_the_colour_of_a_name() -> None:
    picture = draw.dataflow(captured(1).graph, name_of=lambda node: "two" if node.name in ("mm", "relu") else "")
    assert "\ntwo: mm relu" in picture.text
    unnamed = next(line for line in picture.text.splitlines() if line.startswith("no name: "))
    assert "mm_1" in unnamed.split() and "relu" not in unnamed.split() and "primals_1" not in unnamed.split()
    assert picture.png != draw.dataflow(captured(1).graph).png
    dark = draw.dataflow(captured(1).graph, name_of=lambda node: "two" if node.name in ("mm", "relu") else "",
                         palette={"two": "#222222"})
    assert dark.text == picture.text and dark.png != picture.png
    narrow = draw.dataflow(captured(1).graph, name_of=lambda node: "", rest="not kept", narrow=True)
    assert narrow.text.splitlines()[-1].startswith("not kept: ")


def test_arrows_skip_the_nodes_that_are_not_drawn() -> None:
    joint = captured(2).graph
    some = [n for n in joint.graph.nodes if n.name in ("primals_1", "relu", "threshold_backward")]
    head, *across = draw.dataflow(joint, only=some).text.splitlines()
    assert head.startswith("dataflow: 2 operators, 1 arrows") and across == ["relu > threshold_backward"]


@pytest.mark.nightly
def test_a_large_graph_is_refused() -> None:
    with fake_world(2) as world, pytest.raises(WorkbenchError, match="at most 40 boxes, and this graph has"):
        draw.dataflow(capture(author(load_recipe("llama3_fsdp").override({"mesh.dp_shard": 2}), world)).graph)
