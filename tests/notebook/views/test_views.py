"""What the views answer, how much they send, and that a saved notebook keeps none of it."""

import json
from dataclasses import replace

import pytest
import torch
from unpacked import unpacked

from workbench import WorkbenchError, author_module, capture, fake_world, load_recipe, show
from workbench.checks.record import PassRecord
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.notebook import draw
from workbench.notebook.show import outputs
from workbench.notebook.views import GraphView, MemoryView, PassStepper, TimelineView
from workbench.passes.registry import find_pass
from workbench.pipeline.expert_load import ExpertLoad
from workbench.pipeline.train import Training

pytestmark = pytest.mark.integration
STATE = 6_000


@pytest.fixture
def stepper(tour):
    return PassStepper(tour.records)


def test_a_control_and_its_trait_are_equal_both_ways(stepper):
    shown = {each.description: each for row in stepper.panel.children[:-1] for each in row.children}
    shown["pass"].value = 3
    assert stepper.step == 3 and tuple(shown["graph"].options) == ("forward", "backward")
    stepper.part = "backward"
    assert shown["graph"].value == "backward"
    stepper.step = 0
    assert shown["pass"].value == 0 and tuple(shown["graph"].options) == ("joint",)
    sent = []  # what a page gets, errors by name
    stepper.send = lambda content, buffers=None: sent.append(content)
    stepper._answer(None, {"id": "7", "call": "details", "args": {"id": "nowhere", "step": 0}}, [])
    assert sent == [{"id": "7", "error": "details: this view has no 'nowhere'"}]


def test_a_displayed_view_is_its_panel_and_leaves_no_text_where_it_is_not_drawn(tour, stepper):
    data = stepper._repr_mimebundle_()
    assert data["text/plain"] == "" and repr(stepper) == "PassStepper(passes)"
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == stepper.panel.model_id
    assert stepper.panel.children[-1] is stepper
    for view, most in ((stepper, STATE), (GraphView(tour.captured), STATE), (TimelineView(tour.records[-1]), 100_000),
                       (MemoryView(tour.records[-1]), 100_000)):  # the last two with all that they show
        assert len(json.dumps(view.get_state(), default=str)) < most  # what a saved notebook keeps


def test_an_operator_tells_all_that_is_known(tour, stepper):
    found = stepper.ask("find", query="layers.0.feed_forward.w2 layers.py", step=3, part="forward")
    assert found["count"] > 5
    name = next(n.name for n in tour.records[3].after[0].graph.nodes if n.name.startswith("_pre_bucket"))
    (where,) = [i for i in stepper.tree(step=3, part="forward").id_of if i.endswith(f"/{name}")]
    rows = dict(stepper.ask("details", id=where, step=3, part="forward")["rows"])
    assert rows["history"] == "added by transformer_block_bucketing"
    assert {"operator", "result", "bytes", "module", "source", "placement", "reads", "read by"} <= rows.keys()


def test_memory_keeps_its_peak_and_timeline_every_collective(tour):
    drawn = unpacked(MemoryView(tour.step.pair).data)
    (curve,) = drawn["curves"]
    assert max(size for _, size, _ in curve["points"]) == curve["peak"]
    assert [said for _, said, _, _ in drawn["begins"]] == ["forward", "backward"] and len(drawn["colors"]) == 1
    still = draw.memory(tour.step.pair).text
    assert all(f"{size:,} B  {name}" in still for name, size, _ in drawn["holders"])
    answer = unpacked(TimelineView(tour.records[-1]).data)
    for run in answer["runs"]:
        shown = sum(bar[0] != "compute" for bar in run["spans"])
        assert f" of {shown} collectives hidden" in run["fates"]
        assert set(run["lanes"]) <= set(answer["colors"])


def test_show_picks_a_picture_and_a_view_for_each_noun(tour, capsys):
    with fake_world(1) as world:
        joint = capture(author_module(torch.nn.Linear(2, 2), world, None, batch=lambda: (torch.ones(1, 2),)))
    nouns = {"recipe": tour.authored.recipe, "joint": joint, "pair": tour.step.pair, "built": tour,
             "record": tour.records[-1], "records": tour.records, "graph": tour.captured}
    kinds = {name: [getattr(output, "kind", type(output).__name__) for output in outputs(what)]
             for name, what in nouns.items()}
    assert kinds == {"recipe": ["Picture"], "joint": ["Picture", "graph"], "pair": ["Picture", "Picture", "graph"],
                     "built": ["Picture", "Table", "stepper"], "record": ["Table", "stepper"],
                     "records": ["Table", "stepper"], "graph": ["Picture", "graph"]}
    load = ExpertLoad(["moe"], [[[[3, 1]]]], [[[0]]])
    for what in (world, tour.records[0].verdicts[0], load):  # they say it themselves
        assert outputs(what) == [what]
    trained = Training([1.0], [1.0], [1.0], 1, None, load)
    assert outputs(trained) == [load] and outputs(replace(trained, load=None)) == []
    show(tour.records[-1], "timeline")
    said = capsys.readouterr().out
    assert "before transformer_block_bucketing: simulated on h100" in said and "TimelineView" not in said


def test_passes_without_a_graph_show_their_kernels_or_their_replays(monkeypatch):
    kernels = Kernels("forward", (Kernel(0, "cpp_0", "cpp", ("relu",)),), ("relu",))
    monkeypatch.setattr("workbench.notebook.show.kernels_of", lambda before, after: (kernels,))
    table, view = outputs(PassRecord(find_pass("full_inductor_compilation"), None, (), (), 0, 0))
    assert table.rows == ((kernels.summary(),),) and view.title == table.title  # which the live view hides
    assert view.ask("kernel", graph="forward", number=0)["name"] == "call 0: cpp_0"
    assert outputs(PassRecord(find_pass("cudagraph"), None, (), (print,), 0, 0)) == []


def test_what_has_no_picture_is_refused():
    for what, said in (((3,), "int has no picture: show takes a recipe, world, graph"),
                       ((load_recipe("tour"), "memory"), "Recipe has no picture for view 'memory'"),
                       ((3, "sideways"), "view must be one of graph, passes, timeline, memory")):
        with pytest.raises(WorkbenchError, match=said):
            show(*what)
    with pytest.raises(WorkbenchError, match="no pass has run: there is nothing to step through"):
        PassStepper([])


def test_a_graph_from_elsewhere_and_an_empty_one_have_views():
    elsewhere = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    rows = dict(GraphView(elsewhere).ask("details", id="graph/relu")["rows"])
    assert rows["result"] == rows["module"] == rows["source"] == "not recorded"
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).graph_module
    assert GraphView(exported).ask("view", opened=None)["boxes"]
    empty = torch.fx.Graph()
    empty.output(())
    assert GraphView(torch.fx.GraphModule({}, empty)).ask("view", opened=None)["boxes"] == ()
