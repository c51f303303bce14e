"""Measured estimates: one rank measures, all have its times; what is kept is used, and refused if it is another's."""

from __future__ import annotations

import json

import pytest
import torch
from on_ranks import FSDP_TP, small

from workbench import author, build, capture, fake_world, partition, run_partitioned
from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.timeline import Estimates, costs_of, estimates_of
from workbench.lab.measured_costs.measure import measure
from workbench.passes import autobucketing_reordering as bucketing
from workbench.recipe.contracts import EstimateOptions
from workbench.recipe.sections import PassSpec
from workbench.torch_api.devices.timing import signature
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration

MEASURED = {"estimates": "measured"}


def graph():
    return capture(author(small({"dp_shard": 2}), current_world())).graph


def times(path):
    return measure(graph(), path)


@pytest.mark.ranks
def test_ranks_agree_and_what_is_kept_is_not_measured_again(pool2, tmp_path):
    path = str(tmp_path / "ms.json")
    first, second = pool2.run(times, path)
    assert first == second and len(first) > 5 and all(ms > 0 for ms in first.values())
    kept = json.loads((tmp_path / "ms.json").read_text())
    assert kept["milliseconds"] == first and kept["torch"] == torch.__version__ and kept["device"] == "cpu"
    assert pool2.run(times, path) == [first, first]


def refusals(paths):
    gm, said = graph(), []
    for path in paths:
        with pytest.raises(WorkbenchError) as error:
            measure(gm, path)
        said.append(str(error.value))
    return said


@pytest.mark.ranks
def test_a_file_of_another_torch_is_refused_on_every_rank(pool2, tmp_path):
    messages = {"torch": "estimates of torch 2.0.0 on cpu, and this is torch", "device": "on A GPU, and this is torch",
                "milliseconds": "not a file of estimates"}
    sound = {"format_version": 1, "torch": torch.__version__, "device": "cpu", "milliseconds": {}}
    for key, odd in {"torch": "2.0.0", "device": "A GPU", "milliseconds": 3}.items():
        (tmp_path / key).write_text(json.dumps(sound | {key: odd}))
    for said in pool2.run(refusals, [str(tmp_path / key) for key in messages]):
        assert all(message in each for message, each in zip(messages.values(), said, strict=True))


def built(passes):
    done = build(small({"dp_shard": 2}, (), passes), current_world())
    return [str(r.outcome) for r in done.records], str(done.schedule.outcome)


@pytest.mark.ranks
def test_passes_that_are_given_them_schedule_alike_on_every_rank(pool2, tmp_path):
    """Measured, two ranks would differ; compared before anything runs, their schedules do not."""
    options = MEASURED | {"estimates_file": str(tmp_path / "ms.json")}
    listed = tuple({"name": name, **options} for name in ("autobucketing_reordering", "overlap_collectives"))
    for outcomes, schedule in pool2.run(built, listed):
        assert outcomes[0] == "PASS" and schedule == "PASS"


def test_a_world_without_values_measures_nothing():
    with fake_world(4) as world:
        pair = partition(capture(author(small(FSDP_TP), world)))
        with pytest.raises(WorkbenchError, match="needs ranks that run, and this world is fake: take world gloo"):
            run_partitioned(pair, [PassSpec(name="overlap_collectives", options=MEASURED)])
        assert estimates_of(pair.forward, EstimateOptions()).times == {}


def test_what_is_known_takes_the_place_of_what_is_estimated():
    with fake_world(4) as world:
        gm = capture(author(small(FSDP_TP), world)).graph
        plain = costs_of(gm, "h100")
        one = next(n for n in gm.graph.nodes if "mm" in n.name and n.op == "call_function")
        known = Estimates({signature(one): 123.0})
        assert costs_of(gm, "h100", known).compute[one] == 123.0 > plain.compute[one]


def test_the_bucketing_scheduler_asks_for_what_is_known(monkeypatch):
    asked = []
    monkeypatch.setattr(bucketing, "estimates_of", lambda gm, options: lambda node: asked.append(node))
    with fake_world(4) as world:
        pair = partition(capture(author(small(FSDP_TP), world)))
        run_partitioned(pair, ["autobucketing_reordering"])
    assert any(is_compute(node) for node in asked)
