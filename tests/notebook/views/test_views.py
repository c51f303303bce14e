"""What the views answer, how much they send, and that a saved notebook keeps none of it."""

from __future__ import annotations

import json

import pytest
import torch
from unpacked import unpacked

from workbench import WorkbenchError, build, capture, fake_world, load_lesson, load_recipe, show
from workbench.authoring.author import author
from workbench.notebook import draw
from workbench.notebook.show import outputs
from workbench.notebook.views import GraphView, MemoryView, PassStepper, TimelineView

pytestmark = pytest.mark.integration
RECIPE = load_recipe("tour").override({"model.n_layers": 2})
PAYLOAD, STATE = 2_000_000, 6_000


@pytest.fixture(scope="module")
def built():
    with fake_world(RECIPE.mesh.world_size) as world:
        return build(RECIPE, world)


@pytest.fixture
def stepper(built):
    return PassStepper(built.records)


def answer(view, message):
    """What a page that sends `message` gets: the messages, and their buffers."""
    sent = []
    view.send = lambda content, buffers=None: sent.append((content, buffers))
    view._answer(None, message, [])
    return sent


def controls(view):
    """The controls above a view, by their description."""
    return {each.description: each for row in view.panel.children[:-1] for each in row.children}


def test_a_control_and_its_trait_are_equal_both_ways(built, stepper):
    shown = controls(stepper)
    shown["pass"].value = 3
    assert stepper.step == 3 and tuple(shown["graph"].options) == ("forward", "backward")
    stepper.part = "backward"
    assert shown["graph"].value == "backward"
    shown[""].value = dict(shown[""].options)["first PASS"]
    assert stepper.step == shown["pass"].value == 0 and tuple(shown["graph"].options) == ("joint",)
    with pytest.raises(WorkbenchError, match="step 9: the passes are numbered from 0 to 3"):
        stepper.step = 9
    assert stepper.step == 0


def test_a_displayed_view_is_its_panel_and_leaves_no_text_where_it_is_not_drawn(built, stepper):
    data = stepper._repr_mimebundle_()
    assert data["text/plain"] == "" and repr(stepper) == "PassStepper(passes)"
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == stepper.panel.model_id
    assert stepper.panel.children[-1] is stepper


def test_errors_go_to_the_page_by_name(stepper):
    ((content, _),) = answer(stepper, {"id": "7", "call": "details", "args": {"id": "nowhere", "step": 0}})
    assert content == {"id": "7", "error": "details: this view has no 'nowhere'"}
    ((content, _),) = answer(stepper, {"id": "8", "call": "msg", "args": {}})
    assert content["error"] == "a view of kind 'stepper' does not know 'msg'"


def test_a_saved_notebook_keeps_a_few_lines(built):
    for view in (PassStepper(built.records), GraphView(built.captured)):
        assert len(json.dumps(view.get_state(), default=str)) < STATE
    for view in (TimelineView(built.records[-1]), MemoryView(built.records[-1])):  # with all that they show
        assert len(json.dumps(view.get_state(), default=str)) < 100_000


def test_an_operator_tells_all_that_is_known(built, stepper):
    found = stepper.ask("find", query="layers.1.feed_forward.w2 layers.py", step=3, part="forward")
    assert found["count"] > 5
    name = next(n.name for n in built.records[3].after[0].graph.nodes if n.name.startswith("_pre_bucket"))
    (where,) = [i for i in stepper.tree(step=3, part="forward").id_of if i.endswith(f"/{name}")]
    rows = dict(stepper.ask("details", id=where, step=3, part="forward")["rows"])
    assert rows["history"] == "added by transformer_block_bucketing"
    assert {"operator", "result", "bytes", "module", "source", "reads", "read by"} <= rows.keys()


def test_every_other_value_tells_its_placement_or_why_not(built):
    view = GraphView(built.step.pair.by_part)
    said = {id.rpartition("/")[2]: dict(view.ask("details", id=id)["rows"])["placement"] for id in view.tree().named}
    gathered = next(n.name for n in built.step.pair.graphs[0].graph.nodes if "all_gather_into_tensor" in n.name)
    assert said[gathered].startswith("dp_shard: every rank holds the same; tp: unknown")
    assert all(text for text in said.values()) and sum(text.startswith("unknown: ") for text in said.values()) > 20


def test_memory_keeps_its_peak_and_timeline_every_collective(built):
    drawn = unpacked(MemoryView(built.step.pair).data)
    (curve,) = drawn["curves"]
    assert max(size for _, size, _ in curve["points"]) == curve["peak"]
    assert [said for _, said, _, _ in drawn["begins"]] == ["forward", "backward"] and len(drawn["colors"]) == 1
    still = draw.memory(built.step.pair).text
    assert all(f"{size:,} B  {name}" in still for name, size, _ in drawn["holders"])
    answer = unpacked(TimelineView(built.records[-1]).data)
    for run in answer["runs"]:
        shown = sum(bar[0] != "compute" for bar in run["spans"])
        assert f" of {shown} collectives hidden" in run["fates"]
        assert set(run["lanes"]) <= set(answer["colors"])


def test_show_picks_a_picture_and_a_view_for_each_noun(built, capsys):
    with fake_world(RECIPE.mesh.world_size) as world:
        joint = capture(author(RECIPE.override({"model.n_layers": 1}), world))
        kinds = {}
        for name, what in {"recipe": RECIPE, "world": world, "joint": joint, "pair": built.step.pair, "built": built,
                           "record": built.records[-1], "records": built.records, "graph": built.captured,
                           "verdict": built.records[0].verdicts[0], "lesson": load_lesson("00_tour")}.items():
            made = outputs(what)
            kinds[name] = [getattr(each, "kind", type(each).__name__) for each in made]
    assert kinds == {"recipe": ["Picture"], "world": ["Table"], "joint": ["Picture", "graph"],
                     "pair": ["Picture", "Picture", "graph"], "built": ["Picture", "Table", "stepper"],
                     "record": ["Picture", "stepper"], "records": ["Table", "stepper"], "graph": ["Picture", "graph"],
                     "verdict": ["Table"], "lesson": ["Table"]}
    assert [getattr(o, "kind", "") for o in outputs(built, "graph")] == ["", "", "graph"]
    assert [getattr(o, "kind", "") for o in outputs(built, "passes")] == ["", "stepper"]
    show(built.records[-1], "timeline")
    said = capsys.readouterr().out
    assert "before transformer_block_bucketing: simulated on h100" in said and "TimelineView" not in said


def test_what_has_no_picture_is_refused():
    with pytest.raises(WorkbenchError, match="int has no picture: show takes a recipe, world, graph"):
        show(3)
    with pytest.raises(WorkbenchError, match="has no picture for view 'memory'"):
        show(RECIPE, "memory")
    with pytest.raises(WorkbenchError, match="Recipe has no picture for view 'passes'"):
        show(RECIPE, "passes")
    with pytest.raises(WorkbenchError, match="view must be one of graph, passes, timeline, memory"):
        show(RECIPE, "sideways")
    with pytest.raises(WorkbenchError, match="no pass has run: there is nothing to step through"):
        PassStepper([])


def test_a_graph_from_elsewhere_and_an_empty_one_have_views():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    elsewhere = torch.fx.GraphModule({}, graph)
    seen = GraphView(elsewhere).ask("view", opened=None)
    assert seen["missing"] == ("no module paths: operators stand in their order", "no source lines",
                               "no values: shapes, bytes and costs are unknown")
    rows = dict(GraphView(elsewhere).ask("details", id="graph/relu")["rows"])
    assert rows["result"] == rows["module"] == rows["source"] == "not recorded"
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).graph_module
    assert GraphView(exported).ask("view", opened=None)["boxes"]
    empty = torch.fx.Graph()
    empty.output(())
    assert GraphView(torch.fx.GraphModule({}, empty)).ask("view", opened=None)["boxes"] == ()
