"""The text of each picture and table holds the facts of what it shows, and no time that differs from run to run."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from unpacked import unpacked

from workbench import WorkbenchError, draw
from workbench.checks.record import PassRecord
from workbench.graph.facts import Known
from workbench.graph.read.cost import device_spec
from workbench.graph.read.nodes import kind_of
from workbench.graph.read.simulated_run import StepTimeline, simulated
from workbench.notebook.graph_diff import tagged as tagged_nodes
from workbench.notebook.show import outputs
from workbench.passes.registry import find_pass

pytestmark = pytest.mark.integration
LOWERED, REPLAYED = (PassRecord(find_pass(name), None, (), (), 0.0, 0.0)
                     for name in ("full_inductor_compilation", "cudagraph"))


def test_a_graph_counts_its_operators_in_both_directions_and_a_large_one_has_no_dataflow(tour):
    with pytest.raises(WorkbenchError, match="at most 40 boxes, and this graph has"):
        draw.dataflow(tour.captured)
    with pytest.raises(AttributeError, match="draw has no picture 'nothing'"):
        _ = draw.nothing
    calls = [node for node in tour.captured.graph.nodes if node.op == "call_function"]
    backward = [node for node in calls if node.meta.get("partitioner_tag") == "is_backward"]
    text = draw.graph(tour.captured, "captured").text
    assert text.startswith(f"captured: {len(calls)} operators, {len(calls) - len(backward)} forward and ")
    assert f"matmul: 8 forward, {Counter(map(kind_of, backward))['matmul']} backward\n" in text


def test_a_build_shows_what_its_passes_proved(tour):
    picture = draw.pipeline(tour)
    assert picture.text.splitlines()[::3] == ["tour on 8 fake ranks (dp_shard 2 x tp 4)",
                                              "passes: transformer_block_bucketing PASS"]
    data, metadata = picture._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"} and data["text/plain"] == picture.text == repr(picture)
    assert metadata["needs_background"] == "light"  # a dark page inverts what has this mark
    assert metadata["image/png"]["alt"] == picture.alt and len(picture.png) < 80_000
    assert draw.pipeline(tour).png == picture.png  # the same facts, the same bytes


def test_a_table_in_text_and_html_and_the_verdict_of_a_pass_that_did_nothing(tour):
    record = tour.records[-1]
    idle = draw.verdicts([replace(record, after=record.before, known=Known(), _readings={})])
    assert "NO_EFFECT" in idle.rows[0] and "background:#f7ee8f" in idle._repr_html_()
    assert idle.notes[0].startswith("transformer_block_bucketing: effect: NO_EFFECT, ")
    html = draw.table("t", ("a", "n"), [("x<y", 12345), ("b", 7)], "note")._repr_html_()
    assert "x&lt;y" in html and "12,345" in html and "<div>note</div>" in html


def test_changes_name_axes_and_count_tags(tour):
    table = draw.changes(tour.records[-1], limit=10_000)
    launches = [row[2] for row in table.rows if "_c10d_functional.all_gather_into_tensor_out(" in row[2]]
    assert launches and all(", dp_shard.gather, out=" in text for text in launches)
    assert not re.search(r"[0-9a-f]{40}", repr(table))  # a process group's name differs from run to run
    tagged = tour.records[1]
    (note,) = draw.changes(tagged).notes
    assert note.startswith(f"joint: {len(tagged_nodes(tagged)[0])} tagged for the partitioner (")


@pytest.mark.parametrize("more", [[], [LOWERED], [REPLAYED]], ids=lambda more: f"{len(more)} more")
def test_a_builds_timeline_charges_what_runs(tour, more):
    """Fused kernels behind a compiler, launches where nothing is replayed; a record of the build charges the same."""
    known = tour.known.fork()
    known.records += more
    built, launch = replace(tour, known=known), device_spec("h200x1").launching_us(compiled=LOWERED in more)
    wanted = simulated(tour.step.pair.by_part, "h200x1", fused=LOWERED in more, launch_us=launch[0], view_us=launch[1],
                       replayed=REPLAYED in more)
    assert str(wanted) in outputs(built, "timeline", device="h200x1")[0].text
    assert str(wanted) in outputs(known.records[len(tour.records) - 1], "timeline", device="h200x1")[0].text
    bare = simulated(tour.step.pair.by_part, "h200x1")
    assert (wanted.total_ms > 2 * bare.total_ms) is (REPLAYED not in more)


def test_a_measured_timeline_stands_beside_the_simulated_one(tour):
    pair = tour.step.pair
    ran = StepTimeline("measured on a GPU", tuple(simulated(pair.by_part).spans), 5.0, 4.0)
    picture, view, *_ = outputs(pair, "timeline", measured=ran)
    assert "measured: measured on a GPU" in picture.text and "forward and backward: simulated" in picture.text
    assert [run["title"].split(":")[0] for run in unpacked(view.data)["runs"]] == ["forward and backward", "measured"]
    with pytest.raises(WorkbenchError, match=r"takes a StepTimeline"):
        outputs(pair, "timeline", measured=1 << 30)
    with pytest.raises(WorkbenchError, match="takes a peak in bytes"):
        outputs(pair, "memory", measured=ran)
