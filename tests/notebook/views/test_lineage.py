"""Where a node came from: each pass that touched it, and the partitioner where it made it."""

from workbench.notebook.graph_diff import diffs, tagged
from workbench.notebook.views.lineage import history


def test_added_changed_and_moved(tour):
    records, bucketing = tour.records, tour.records[-1]
    added = next(n.name for n in bucketing.after[0].graph.nodes if "_pre_bucket" in n.name)
    assert history(records, "forward", added) == ["added by transformer_block_bucketing"]
    marks = diffs(bucketing)[0].marks
    moved = next(name for name, mark in marks.items() if mark == "moved" and not diffs(records[0])[0].marks.get(name))
    assert history(records, "forward", moved)[-1] == "moved by transformer_block_bucketing"
    assert history(records, "forward", "no_such_node") == []


def test_what_no_pass_touched_was_captured_or_made_by_the_partitioner(tour):
    records = tour.records
    touched = {name for record in records for each in diffs(record) for name in each.marks}
    quiet = next(n.name for n in records[0].before[0].graph.nodes if n.op == "call_function" and n.name not in touched)
    assert history(records, "joint", quiet) == ["captured"]
    joint = {n.name for n in records[-2].after[0].graph.nodes}
    made = [n.name for n in records[-1].before[1].graph.nodes if n.name not in joint]
    assert {history(records, "backward", name)[0] for name in made} <= {"made by partition"}


def test_tags_are_told_node_by_node(tour):
    by_name = {record.name: tagged(record)[0] for record in tour.records[:3]}
    assert by_name["inductor_decomposition"] == {}
    assert set(by_name["reshard_after_forward"].values()) == {"MUST_RECOMPUTE"}
    assert "MUST_SAVE" in by_name["activation_checkpointing"].values()
