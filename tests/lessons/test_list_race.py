"""The race's sliders, its map and its figures agree, and what is too close is not ranked."""

from __future__ import annotations

import pytest
from unpacked import unpacked

from workbench import WorkbenchError
from workbench.graph.read.simulated_run import Span, StepTimeline
from workbench.notebook.show import outputs
from workbench_lessons.l05_bucket_and_overlap.list_race import ListRace


def run(compute: float, exposed: float) -> StepTimeline:
    spans = (Span("a", "tp", 0.0, 1.0, exposed, "latency"),)
    return StepTimeline("simulated on paper", spans, compute + exposed, compute)


def race(part: float = 0.04) -> ListRace:
    """`late` wins where tokens are few; at 10 tokens and 8 GB/s the two differ by 2 %."""
    runs = {(1, 8): {"early": run(1, 0.5), "late": run(1.1, 0.2)}, (10, 8): {"early": run(10, 0), "late": run(10.2, 0)},
            (1, 4): {"early": run(1, 1), "late": run(1.1, 0.4)}, (10, 4): {"early": run(10, 0.1), "late": run(11, 0.4)}}
    return ListRace(runs, ("#999999", "#cc79a7"), margin=lambda run: part * run.total_ms)


def test_the_sliders_choose_the_figures():
    made = race()
    assert made.figures == {"early": 10, "late": 10.2}  # it starts in the middle
    tokens, link = made.panel.children[0].children
    assert [each.description for each in (tokens, link)] == ["tokens", "link, GB/s"]
    assert (tokens.value, link.value) == (1, 1)
    link.value = 0
    assert made.result() == {"early": pytest.approx(10.1), "late": pytest.approx(11.4)}


def test_the_winner_flips_and_a_close_lead_is_marked():
    made = race()
    assert {key: made.winner(*key) for key in made.runs} == {(1, 8): "late", (10, 8): "early ?", (1, 4): "late",
                                                             (10, 4): "early"}
    assert race(0.0).winner(10, 8) == "early"
    table, view, _ = outputs(made)
    assert [row[1:] for row in table.rows] == [("late", "early ?"), ("late", "early")]
    assert "less than the model's error" in table.notes[0]
    data = unpacked(view.data)
    assert data["winners"]["10 4"] == "early" and data["runs"]["1 8"]["late"] == [1.1, 0.2, pytest.approx(1.3)]
    runs = made.runs
    with pytest.raises(WorkbenchError, match=r"the same lists for every pair .*: \(10, 4\) is missing"):
        ListRace({key: runs[key] for key in list(runs)[:-1]}, ("#999999", "#cc79a7"), margin=lambda run: 0.0)
