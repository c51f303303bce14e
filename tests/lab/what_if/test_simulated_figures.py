"""Every text with simulated figures says what is known of their error."""

from dataclasses import replace

import pytest
from unpacked import unpacked

from workbench import PassSpec, author, capture, device_spec, load_recipe, partition, run_partitioned, what_if
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.simulated_run import simulated
from workbench.notebook import draw
from workbench.notebook.draw.timeline import runs_of
from workbench.notebook.show import outputs
from workbench.notebook.views import node_facts
from workbench.notebook.views.timeline import TimelineView
from workbench_lessons.l08_replay_with_cudagraphs.launch_bound import draw_pace, paced

pytestmark = pytest.mark.integration
DEVICE = "h200x1"
RECIPE = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 4, "model.n_layers": 1, "data.seq_len": 64})


@pytest.fixture(scope="module")
def pair(fake4):
    return partition(capture(author(RECIPE, fake4)))


def test_a_simulated_figure_carries_its_error(pair):
    overlap = PassSpec(name="overlap_collectives", options={"device": DEVICE})
    record = run_partitioned(pair.fork(), [overlap])[0][0]
    run, spec = simulated(pair.by_part, DEVICE), device_spec(DEVICE)
    texts = {
        "simulated": run,
        "its trace for Perfetto": run.source,
        "show, static": draw.timeline(pair, DEVICE).text,
        "show, live": unpacked(TimelineView(runs_of(pair, DEVICE)).data),
        "show, both": outputs(pair, "timeline", device=DEVICE),
        "draw_pace": draw_pace({"step": paced(pair.by_part, DEVICE, launch_us=5.0)}).text,
        "the effect of a reordering": record.verdict("effect").evidence["estimated_for"],
        "its order": record.verdict("order").evidence["estimated_for"],
    }
    assert spec.trust.startswith("compute within")
    assert [name for name, text in texts.items() if spec.trust not in str(text)] == []
    unknown = replace(spec, profile=spec.profile.model_copy(update={"errors": {}}))
    assert "error unknown" in str(simulated(pair.by_part, unknown))


def test_a_figure_of_a_data_sheet_is_not_calibrated(pair):
    facts = node_facts.node_facts(next(filter(is_compute, pair.forward.graph.nodes)))
    for text in (facts, simulated(pair.by_part, "h100"), device_spec(node_facts.DEVICE).trust):
        assert "not calibrated" in str(text)


def test_what_if_says_it_in_its_rows_its_picture_and_its_study(fake4):
    study = what_if(RECIPE, fake4, device=DEVICE)
    difference = study.change({"data.batch_per_rank": 1})
    for said in (str(study), str(difference), repr(draw.difference(difference))):
        assert device_spec(DEVICE).trust in said
