"""What the lessons show of ipywidgets: a question of `what_if` as controls, and traits that others follow."""

from __future__ import annotations

import pytest
from ipywidgets import HTML, VBox, dlink, interactive
from stack import split

from workbench import fake_world, load_recipe, run_partitioned, what_if
from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder
from workbench_lessons.l05_bucket_and_overlap.order_pass import order_pass


@pytest.fixture(scope="module")
def study():
    recipe = load_recipe("llama3_fsdp").override({"model.n_layers": 1, "mesh.dp_shard": 2})
    with fake_world(2) as world:
        yield what_if(recipe, world)


@pytest.mark.parametrize(("asked", "choice", "key"), [
    ({"passes": {"none": [], "blocks": ["transformer_block_bucketing"]}}, ["transformer_block_bucketing"], "passes"),
    ({"joint_passes": {"none": [], "reshard": ["reshard_after_forward"]}}, ["reshard_after_forward"], "joint_passes"),
    ({"seq_len": (32, 128, 32)}, 96, "data.seq_len"),
    pytest.param({"layers": [("one", 1), ("two", 2)]}, 2, "model.n_layers", marks=pytest.mark.nightly),
])
def test_interact_asks_each_question_of_a_study(study, asked, choice, key):
    (options,) = asked.values()

    def ask(value):
        return study.change(**{key: value}) if key.endswith("passes") else study.change({key: value})

    controls = interactive(ask, value=options)
    assert isinstance(controls, VBox)
    controls.update()
    before = study.now.figures
    controls.children[0].value = choice
    assert controls.result.after.figures == study.now.figures != before


def test_after_a_list_that_is_refused_the_next_choice_works(study):
    lists = {"none": [], "wrong way round": ["overlap_collectives", "transformer_block_bucketing"],
             "blocks": ["transformer_block_bucketing"]}
    controls = interactive(lambda passes: study.change(passes=passes), passes=lists)
    controls.update()
    controls.children[0].value = lists["wrong way round"]
    controls.children[0].value = lists["blocks"]
    assert sum(controls.result.after.figures.launches.values()) < sum(controls.result.before.figures.launches.values())


def test_a_text_follows_the_order_on_a_board_with_the_verdicts_of_its_pass(study):
    pair = split(study.world)
    board, text = CollectiveOrder(pair.backward, "h200x2"), HTML()

    def judged(order):
        (record,), _ = run_partitioned(pair.fork(), [order_pass(order, board.part, device="h200x2")])
        return "; ".join(str(record.verdict(check)) for check in ("lint", "effect"))

    dlink((board, "order"), (text, "value"), judged)
    assert text.value.startswith("lint: PASS; effect: NO_EFFECT")
    board.order = board.rival
    assert text.value == "lint: PASS; effect: PASS"
    board.order = [*board.given[:5], *reversed(board.given[5:-1]), board.given[-1]]
    assert text.value.startswith("lint: FAIL (backward: the graph is malformed: Argument ")
