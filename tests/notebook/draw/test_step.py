"""What a pass did, as a picture, as lines, on the clock and in memory: the text forms hold the facts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from unpacked import unpacked

from workbench import WorkbenchError
from workbench.checks.record import PassRecord
from workbench.graph.read.cost import device_spec
from workbench.graph.read.peak import live_bytes
from workbench.graph.read.simulated_run import StepTimeline, simulated
from workbench.notebook import draw
from workbench.notebook.show import outputs
from workbench.passes.registry import find_pass

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def built(tour):
    return tour


def test_a_step_counts_what_changed(built):
    record = built.records[-1]
    lines = draw.step(record).text.splitlines()
    assert lines[0] == "transformer_block_bucketing: PASS"
    for line, part, found in zip(lines[1:], record.parts, record.diffs(), strict=True):
        assert line.startswith(f"{part}: {found.summary}")


def test_a_pass_that_only_tags_shows_its_tags(built):
    record = built.records[1]
    assert record.name == "activation_checkpointing"
    number = len(record.tagged()[0])
    said = draw.step(record).text
    assert "joint: no node changed" in said and f"joint: {number} tagged for the partitioner (" in said and number > 50


def test_changes_stand_side_by_side_and_name_axes(built):
    record = built.records[-1]
    table = draw.changes(record, limit=10_000)
    before = [row[1] for row in table.rows if row[0] == "forward" and row[1] and not row[1].startswith("(moved")]
    removed = sum(mark == "-" for mark, _ in record.diffs()[0].lines)
    assert len(before) == removed and table.notes == ()
    launches = [row[2] for row in table.rows if "_c10d_functional.all_gather_into_tensor_out(" in row[2]]
    assert launches and all(", dp_shard.gather, out=" in text for text in launches)
    assert not re.search(r"[0-9a-f]{40}", repr(table))  # a process group's name differs from run to run
    assert re.search(r"forward: \d+ more changed lines", repr(draw.changes(record, limit=3)))


LOWERED, REPLAYED = (PassRecord(find_pass(name), None, (), (), 0.0, 0.0)
                     for name in ("full_inductor_compilation", "cudagraph"))


@pytest.mark.parametrize("more", [[], [LOWERED], [LOWERED, REPLAYED], [REPLAYED]], ids=lambda more: f"{len(more)} more")
def test_a_builds_timeline_charges_what_runs(built, more):
    """Fused kernels behind a compiler, launches where nothing is replayed; a record of the build charges the same."""
    known = built.known.fork()
    known.records += more
    made, launch = replace(built, known=known), device_spec("h200x1").launching_us(compiled=LOWERED in more)
    wanted = simulated(built.step.pair.by_part, "h200x1", fused=LOWERED in more, launch_us=launch[0], view_us=launch[1],
                       replayed=REPLAYED in more)
    assert str(wanted) in outputs(made, "timeline", device="h200x1")[0].text
    assert str(wanted) in outputs(known.records[len(built.records) - 1], "timeline", device="h200x1")[0].text
    bare = simulated(built.step.pair.by_part, "h200x1")
    assert str(bare) in outputs(built.step.pair, "timeline", device="h200x1")[0].text
    assert (wanted.total_ms > 2 * bare.total_ms) is (REPLAYED not in more)


def test_a_measured_timeline_stands_beside_the_simulated_one(built):
    pair = built.step.pair
    ran = StepTimeline("measured on a GPU", tuple(simulated(pair.by_part).spans), 5.0, 4.0)
    picture, view, *_ = outputs(pair, "timeline", measured=ran)
    assert "measured: measured on a GPU" in picture.text and "forward and backward: simulated" in picture.text
    assert [run["title"].split(":")[0] for run in unpacked(view.data)["runs"]] == ["forward and backward", "measured"]
    with pytest.raises(WorkbenchError, match=r"takes a StepTimeline"):
        outputs(pair, "timeline", measured=1 << 30)
    with pytest.raises(WorkbenchError, match="takes a peak in bytes"):
        outputs(pair, "memory", measured=ran)


def test_memory_marks_the_peak_and_its_holders(built):
    pair = built.step.pair
    peak = max((live_bytes(gm) for gm in pair.graphs), key=lambda p: p.peak_bytes)
    lines = draw.memory(pair).text.splitlines()
    assert f"peak {peak.peak_bytes:,} B" in lines[0] and f"at {peak.peak_node}" in lines[0]
    assert lines[1].strip().startswith(f"{peak.holders[0][1]:,} B  {peak.holders[0][0]}")
    both = draw.memory(built.records[-1]).text.splitlines()
    assert [line.split(" ")[0] for line in both[:2]] == ["before", "after"]
