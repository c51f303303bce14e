"""A tree of modules holds every operator once, folds what is alike and nothing else, and stays small."""

import pytest
import torch
from blocks import Block
from torch import nn

from workbench import author_module, capture, fake_world, partition
from workbench.graph.partition import saved_nodes
from workbench.notebook.views import graph_tree
from workbench.notebook.views.boxes import BOX_LIMIT, draw
from workbench.notebook.views.graph_tree import GraphTree
from workbench.torch_api.ops import tensor_bytes

pytestmark = pytest.mark.integration


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).sum()


@pytest.fixture(scope="module")
def graphs():
    with fake_world(2) as world:
        mesh = world.mesh_of({"dp_shard": 2})
        joint = capture(author_module(Model(), world, mesh, batch=lambda: (torch.empty(4, 8),)))
        before = joint.graph
        return before, partition(joint)


def plain(length: int) -> torch.fx.GraphModule:
    """A graph from elsewhere: no metadata at all."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for _ in range(length):
        x = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output(x)
    return torch.fx.GraphModule({}, graph)


def leaves(view):
    opened = {box.parent for box in view.boxes}
    return [box for box in view.boxes if box.id not in opened]


def test_layers_alike_are_one_box_and_open_as_one(graphs):
    joint, _ = graphs
    tree = GraphTree({"joint": joint})
    (layers,) = [box for box in draw(tree, ["forward", "forward/layers"]).boxes if box.parent == "forward/layers"]
    assert (layers.label, layers.alike) == ("0-3", 4)
    opened = draw(tree, ["forward", "forward/layers", "forward/layers/0"])
    inside = [box for box in opened.boxes if box.parent == "forward/layers/0"]
    assert {"up", "down"} <= {box.label for box in inside}
    assert 4 * sum(box.nodes for box in inside) == layers.nodes
    ends = {link.source for link in opened.links} | {link.target for link in opened.links}
    assert ends <= {box.id for box in leaves(opened)}  # no link into the air, and none to an open box
    into = [link for link in opened.links if link.target == "forward/norm"]
    assert into and all(link.source.startswith("forward/layers/0/") for link in into)  # what layer 3 hands over
    unfolded = draw(tree, ["forward", "forward/layers"], fold=False)
    assert [box.label for box in unfolded.boxes if box.parent == "forward/layers"] == ["0", "1", "2", "3"]


def test_a_layer_that_differs_is_not_folded(graphs, monkeypatch):
    joint, _ = graphs
    tree = GraphTree({"joint": joint})
    (relu, *_), _ = tree.find("aten.relu layers.2")
    monkeypatch.setattr(tree.nodes[tree.named[relu]], "target", torch.ops.aten.cos.default)
    view = draw(GraphTree({"joint": joint}), ["forward", "forward/layers"])
    found = [(box.label, box.alike) for box in view.boxes if box.parent == "forward/layers"]
    assert found == [("0-1", 2), ("2", 1), ("3", 1)]


def test_what_is_saved_links_forward_and_backward(graphs):
    _, pair = graphs
    view = draw(GraphTree({"forward": pair.forward, "backward": pair.backward}), ["forward", "backward"])
    saved = [link for link in view.links if link.saved]
    assert saved and all(link.source.startswith("forward") and link.target.startswith("backward") for link in saved)
    whole = sum(tensor_bytes(n.meta["val"]) for n in set(saved_nodes(pair.forward, pair.backward)))
    shut = draw(GraphTree({"forward": pair.forward, "backward": pair.backward}), [])
    (link,) = [link for link in shut.links if link.saved]
    assert link.bytes == whole


def test_find_by_operator_module_and_line(graphs):
    joint, _ = graphs
    tree = GraphTree({"joint": joint})
    ids, number = tree.find("aten.relu")
    assert number == 4 and ids[0] == "forward/layers/0/relu"
    assert tree.find("layers.3.up", limit=2)[1] > 3
    by_line, count = tree.find("return x + self.down")
    assert count > 50 == len(by_line)
    assert tree.find("no such thing") == ([], 0) and tree.find("  ") == ([], 0)
    way = tree.way_to(ids[0])
    assert ids[0] in {box.id for box in draw(tree, way, fold=False).boxes}


def test_a_graph_from_elsewhere_is_drawn_with_what_it_lacks():
    tree = GraphTree({"graph": plain(3000)})
    assert len(tree.missing) == 3
    view = draw(tree, ["graph"])
    assert len(view.boxes) < 30 and sum(box.nodes for box in leaves(view)) == 3001
    everything = draw(tree, [block.path for block in graph_tree._blocks(tree.root) if block.path])
    assert len(everything.boxes) <= BOX_LIMIT and "stay shut" in everything.note
