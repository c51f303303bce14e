"""What "Fewer bits, proved" counts and asks: graders with wrong answers; its sentences for each width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench import author, capture, find_nodes, load_recipe, provenance, register_pass, run_joint
from workbench.notebook.lessons.lesson import load_lesson
from workbench.pipeline.train import Batches
from workbench.world.fake import fake_world
from workbench.world.mesh import World
from workbench_lessons.l16_fewer_bits_proved.fewer_bits import (
    casts,
    casts_well,
    counts_bytes,
    counts_casts,
    counts_readers,
    distance,
    exact_gradients,
    output_errors,
    sums_over,
    underflowing,
)
from workbench_lessons.l16_fewer_bits_proved.pictures import float8_grid

ROOT = Path(__file__).parents[2]
LESSON = "16_fewer_bits_proved"
FLOAT8 = torch.float8_e4m3fn


def scaled(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x / (amax / 448)).to(FLOAT8), amax / 448


def test_a_cast_is_graded_on_tensors_that_break_it():
    for answer, score, said in (
            (lambda x: scaled(x.float(), x.float().abs().amax().clamp_min(1e-12)), 1.0, "right"),
            (lambda x: scaled(x.float(), x.float().abs().amax()), 0.8, "wrong with zeros: a value is not finite"),
            (lambda x: (scaled(x.float(), x.float().abs().amax())[0], torch.tensor(1.0)), 0.0, "values are wrong")):
        found = casts_well(answer)
        assert found[0] == score and said in found[1]


def test_readers_that_pay_for_a_cast_and_dimensions_of_the_three_sums():
    assert counts_readers((6, 4)) == (1.0, "right")
    score, message = counts_readers((7, 3))
    assert score == 0 and "apart: too high; fused: both move as many bytes" in message
    right = {"forward": "inputs", "input gradient": "Outputs ", "weight gradient": "tokens"}
    assert sums_over(right) == (1.0, "right")
    assert sums_over({**right, "forward": None, "input gradient": "tokens"}) == (
        1 - 2 / 3, "wrong: input gradient; to do: forward")


@pytest.fixture(scope="module")
def alone():
    """The joint graph of one layer on one rank."""
    recipe = load_recipe("llama3_float8").override({"mesh.dp_shard": 1, "model.n_layers": 1, "passes": []})
    return capture(author(recipe, World("gloo", 1, 0, torch.device("cpu"))))


@pytest.fixture(scope="module")
def converted():
    """Records of one layer on two ranks, by scaling, and the graphs behind the pass."""
    recipe = load_recipe("llama3_float8").override({"model.n_layers": 1})
    found: dict[str, Any] = {}
    with fake_world(2) as world:
        joint = capture(author(recipe, world))
        for scaling in ("tensorwise", "rowwise"):
            graph = joint.fork()
            found[scaling] = run_joint(graph, [{"name": "float8_matmul", "smallest": 64, "scaling": scaling}])[0], graph
    return found


def test_casts_are_counted_in_the_graph(converted):
    (record, tensorwise), (_, rowwise) = converted["tensorwise"], converted["rowwise"]
    assert casts(record.before[0]) == 0
    assert (casts(tensorwise.graph), casts(rowwise.graph)) == (18, 36)
    assert counts_casts("18", of=tensorwise.graph)[0] == 1 and counts_casts(17, of=rowwise.graph) == (0.0, "too low")
    assert counts_casts(18, of=rowwise.graph) == (0.0, "too low: one cast for each tensor")
    assert counts_casts(42, of=rowwise.graph) == (0.0, "too high: no cast is shared")


def test_without_the_input_gradients_rowwise_scales_need_the_fewest_casts(alone):
    for products, count in ((["forward", "weight_gradient"], 22), (["forward", "input_gradient"], 25)):
        graph = alone.fork()
        run_joint(graph, [{"name": "float8_matmul", "smallest": 64, "scaling": "rowwise", "products": products}])
        assert counts_casts(count, of=graph.graph) == (1.0, "right")


def test_bytes_that_the_pass_saved(converted):
    record, _ = converted["tensorwise"]
    weights = 196_608
    assert counts_bytes(weights - 28, of=record) == (1.0, "right")
    assert counts_bytes(weights, of=record) == (0.0, "the scales travel, too")
    assert counts_bytes(0, of=converted["rowwise"][0])[0] == 1  # its gathers keep their type


def test_exact_gradients_are_the_model_s_own(alone):
    exact = exact_gradients(alone.authored.recipe, Batches(alone.authored).at(0))
    assert set(exact) == dict(alone.authored.module.named_parameters()).keys()
    assert {gradient.dtype for gradient in exact.values()} == {torch.float64}
    assert distance(2 * exact["norm.weight"], exact["norm.weight"]) == 1


def test_the_values_that_a_cast_of_the_backward_turns_into_0_are_counted_by_module(alone):
    """A scale that is far too large makes zeros, and a right one hardly any."""

    def coarse(gm, example_inputs, *, options):
        for node in find_nodes(gm, op="clamp_min"):
            if provenance(node).module.endswith("w3") and provenance(node).backward:
                node.target, node.args = torch.ops.aten.full_like.default, (node.args[0], 448e9)
        return gm

    register_pass("coarse", stage="joint", numerics="lossy", tolerance=9.0)(coarse)
    pass_ = {"name": "float8_matmul", "smallest": 64}
    right, wrong = underflowing(alone, [pass_]), underflowing(alone, [pass_, "coarse"])
    assert [name.rpartition(".")[2] for name in right] == ["w2", "w3", "w1", "wo", "wv", "wk", "wq"]
    assert max(right.values()) < 0.2 and {name for name in right if wrong[name] == 1} == {"layers.0.feed_forward.w3"}


def of_notebook(dim: int, *beginnings: str) -> dict[str, Any]:
    """The names that these cells of the notebook leave, each known by how it begins, for a layer of this width."""
    text = (ROOT / "notebooks" / f"{LESSON}.ipynb").read_text(encoding="utf-8")
    sources = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"dim": dim, "__name__": "of_notebook", "float8_grid": float8_grid}
    for beginning in ("import torch", *beginnings):
        (source,) = (source for source in sources if source.startswith(beginning))
        exec(source, names)
    return names


@pytest.mark.integration
@pytest.mark.parametrize("dim", load_lesson(LESSON).parameters["dim"].choices[::2])
def test_what_the_notebook_says_of_an_outlier_holds_for_each_width(dim):
    names = of_notebook(dim, "x = torch", "def cast", "torch.manual_seed", "def with_outlier", "class Layer",
                        'guess = lesson.predict("factor"', "exact = left", "def captured", "pass_ =", "tokens =")
    errors = names["errors"]
    assert errors["float8, rowwise"] < errors["float8, tensorwise"] < 0.05
    assert 12 < errors["float8, tensorwise"] / errors["bfloat16"] < 20
    whole, rest, rowwise, rowwise_rest = (int(each.rstrip("%")) for each in names["with_outlier"](20))
    assert rest == 100 and max(whole, rowwise, rowwise_rest) <= 6
    assert int(names["with_outlier"](17)[1].rstrip("%")) > 20
    proved, best = names["proved"], {"scaling": "rowwise", "products": ["forward", "input_gradient"]}
    wrong = {scaling: proved({"scaling": scaling})[0].evidence["wrong"] for scaling in ("tensorwise", "rowwise")}
    assert wrong == {"tensorwise": 3, "rowwise": 1}
    tensorwise, by_rows = (output_errors(names["outlier"], [{**names["pass_"], "scaling": each}]) for each in wrong)
    assert list(tensorwise) == ["loss", "gradient of gain", "gradient of linear.weight"]
    assert min(tensorwise.values()) > 0.4
    assert max(by_rows["loss"], by_rows["gradient of gain"]) < 0.055 and by_rows["gradient of linear.weight"] > 0.4
    error = proved(best)[0].evidence["worst"]
    assert error < 0.05
    for fewer in ({"products": ["forward", "input_gradient"]}, {"scaling": "rowwise", "products": ["weight_gradient"]},
                  {"scaling": "rowwise", "products": ["forward", "weight_gradient"]}):
        assert proved(fewer)[0].evidence["worst"] > 0.2  # no other choice meets the checkpoint's limit
    smaller = names["tokens"].clone()
    smaller[0] /= 2.0**4
    found = proved({}, names["captured"](smaller))[0]
    assert found.outcome == "PASS" and 0.05 < found.evidence["worst"] < 0.4
