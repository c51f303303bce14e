import torch
from graphs_by_hand import named, two_layer_graph

from workbench.notebook.graph_diff import diff
from workbench.torch_api.aot import clone


def test_each_kind_of_change_is_told_apart(fake4):
    gm = two_layer_graph()
    before = clone(gm)
    assert diff(before, gm).summary == "no node changed"
    first, second = named(gm, "all_gather")
    first.prepend(second)
    relu = named(gm, "aten.relu")[0]
    relu.target = torch.ops.aten.sigmoid.default
    mm = named(gm, "aten.mm")[1]
    with gm.graph.inserting_before(mm):
        added = gm.graph.call_function(torch.ops.aten.clone.default, (mm.args[1],))
    added.meta["val"] = mm.all_input_nodes[1].meta["val"]
    mm.args = (mm.args[0], added)
    found = diff(before, gm)
    assert [n.name for n in found.added] == [added.name] and found.removed == ()
    assert len(found.moved) == 1 and found.moved[0] in (first.name, second.name)
    assert {(a.target, b.target) for a, b in found.changed} == {("aten.relu", "aten.sigmoid"), ("aten.mm", "aten.mm")}


def test_hunks_hold_the_changed_places_only(fake4):
    gm = two_layer_graph()
    before = clone(gm)
    relu = named(gm, "aten.relu")[0]
    relu.replace_all_uses_with(relu.all_input_nodes[0])
    gm.graph.erase_node(relu)
    found = diff(before, gm)
    lines = [f"{mark} {line}" for hunk in found.hunks(0) for mark, line in hunk]
    assert found.summary == "1 removed, 2 changed"
    assert sum(line.startswith("- relu") for line in lines) == 1
    assert not any("all_gather" in line for line in lines)


def test_moving_one_node_far_moves_one_node(fake4):
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: [x + i for i in range(50)])(torch.ones(1))
    before = clone(gm)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    calls[-1].append(calls[0])
    assert diff(before, gm).moved == (calls[0].name,)
