"""Every text with simulated figures says what is known of their error: of a data sheet, and of a measured machine."""

from dataclasses import replace

import pytest
from unpacked import unpacked

from workbench import PassSpec, author, capture, device_spec, load_recipe, partition, run_partitioned, what_if
from workbench.checks import order
from workbench.checks.order import ChosenOrder
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.simulated_run import simulated
from workbench.graph.read.timeline import costs_of
from workbench.notebook import draw
from workbench.notebook.draw.timeline import runs_of
from workbench.notebook.show import outputs
from workbench.notebook.views.node_facts import DEVICE, node_facts
from workbench.notebook.views.timeline import TimelineView
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import draw_pace, paced

pytestmark = pytest.mark.integration
RECIPE = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 4, "model.n_layers": 1, "data.seq_len": 64})


@pytest.fixture(scope="module")
def made(fake4):
    pair = partition(capture(author(RECIPE, fake4)))
    return pair, what_if(RECIPE, fake4, device="h200x1")


def lost(device, pair):
    """The message of a pass that loses one collective of another's order."""
    spec = device_spec(device)
    chosen = ChosenOrder("places", lambda gm: costs_of(gm, device), {"forward a": 1}, f"{spec.name}, {spec.trust}")
    return order._kept(chosen, {"forward a": order.Between(0, 0.1, 0.2)}, "the graph").message


TEXTS = {
    "simulated": lambda device, pair: simulated(pair.by_part, device),
    "its trace for Perfetto": lambda device, pair: simulated(pair.by_part, device).source,
    "show, static": lambda device, pair: draw.timeline(pair, device).text,
    "draw_pace": lambda device, pair: draw_pace({"step": paced(pair.by_part, device, launch_us=5.0)}).text,
    "show, live": lambda device, pair: unpacked(TimelineView(runs_of(pair, device)).data),
    "show, both": lambda device, pair: outputs(pair, "timeline", device=device),
    "an order that was lost": lost,
}


@pytest.mark.parametrize(("device", "trust"), [("h100", "not calibrated"), ("h200x1", "compute within")])
def test_a_simulated_figure_carries_its_error(made, device, trust):
    spec = device_spec(device)
    assert spec.trust.startswith(trust)
    assert [name for name, text in TEXTS.items() if spec.trust not in str(text(device, made[0]))] == []


def test_the_cost_among_a_nodes_facts_carries_its_error(made):
    facts = node_facts(next(filter(is_compute, made[0].forward.graph.nodes)))
    assert device_spec(DEVICE).trust in str(facts)


def test_what_if_says_it_in_its_rows_its_picture_and_its_study(made):
    study = made[1]
    difference = study.change({"model.n_layers": 2})
    trust = device_spec("h200x1").trust
    for said in (str(study), str(difference), repr(draw.difference(difference))):
        assert trust in said


def test_the_pass_that_reorders_says_it_in_its_evidence(made):
    record = run_partitioned(made[0].fork(), [PassSpec(name="overlap_collectives", options={"device": "h200x1"})])[0][0]
    trust = device_spec("h200x1").trust
    assert trust in record.verdict("effect").evidence["estimated_for"]
    assert trust in record.verdict("order").evidence["estimated_for"]


def test_figures_of_a_machine_without_errors_say_that_too(made):
    spec = device_spec("h200x1")
    unknown = replace(spec, profile=spec.profile.model_copy(update={"errors": {}}))
    assert "error unknown" in str(simulated(made[0].by_part, unknown))
