"""What "Fewer bits, proved" counts and asks: graders with wrong answers; its sentences for each width."""


import pytest
import torch

from workbench import (
    Batches,
    WorkbenchError,
    World,
    author,
    capture,
    compile_step,
    load_recipe,
    partition,
    run_joint,
)
from workbench.world.fake import fake_world
from workbench_lessons.l16_fewer_bits_proved.fewer_bits import (
    casts_well,
    counts_bytes,
    distance,
    exact_gradients,
    loss_gaps,
    refused,
    sums_over,
)

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


def test_dimensions_of_the_three_sums():
    right = {"forward": "inputs", "input gradient": "Outputs ", "weight gradient": "tokens"}
    assert sums_over(right) == (1.0, "right")
    assert sums_over({**right, "forward": None, "input gradient": "tokens"}) == (
        1 - 2 / 3, "wrong: input gradient; to do: forward")


@pytest.fixture(scope="module")
def alone():
    """The joint graph of one layer on one rank."""
    recipe = load_recipe("llama3_float8").override({"mesh.dp_shard": 1, "model.n_layers": 1, "passes": []})
    return capture(author(recipe, World("gloo", 1, 0, torch.device("cpu"))))


def test_bytes_that_the_pass_saved():
    recipe, graphs, records = load_recipe("llama3_float8").override({"model.n_layers": 1}), {}, {}
    with fake_world(2) as world:
        joint = capture(author(recipe, world))
        for scaling in ("tensorwise", "rowwise"):
            graphs[scaling] = joint.fork()
            passes = [{"name": "float8_matmul", "smallest": 64, "scaling": scaling}]
            records[scaling] = run_joint(graphs[scaling], passes)[0]
    weights = 196_608
    assert counts_bytes(weights - 28, of=records["tensorwise"]) == (1.0, "right")
    assert counts_bytes(weights, of=records["tensorwise"]) == (0.0, "the scales travel, too")
    assert counts_bytes(0, of=records["rowwise"])[0] == 1  # its gathers keep their type


def test_a_pass_that_converts_something_refuses_no_matmul(alone):
    with pytest.raises(WorkbenchError, match="the pass converted something"):
        refused(lambda: run_joint(alone.fork(), [{"name": "float8_matmul", "smallest": 64}]))


def test_gradients_are_seven_to_eleven_times_as_far_off_as_bfloat16_s(alone):
    batch, module = Batches(alone.authored).at(0), alone.authored.module
    exact, errors = exact_gradients(alone.authored.recipe, batch), {}
    tensorwise = {"name": "float8_matmul", "smallest": 64}
    for name, passes in (("tensorwise", [tensorwise]), ("rowwise", [{**tensorwise, "scaling": "rowwise"}]),
                         ("bfloat16", [])):
        graph = alone.fork()
        run_joint(graph, passes)
        module.zero_grad()
        compile_step(partition(graph))(*batch).backward()
        errors[name] = {each: distance(p.grad, exact[each]) for each, p in module.named_parameters()}
    times = [errors[name][each] / errors["bfloat16"][each] for name in ("tensorwise", "rowwise") for each in exact]
    assert (round(min(times)), round(max(times))) == (7, 11)


def test_the_recorded_losses_end_where_bfloat16_s_do():
    gaps = loss_gaps()
    assert list(gaps) == ["tensorwise", "rowwise", "bfloat16"] and set(gaps["bfloat16"]) == {0.0}
    assert [round(gaps[name][-1], 3) for name in ("tensorwise", "rowwise")] == [-0.005, 0.005]
    for name in ("tensorwise", "rowwise"):
        assert len(gaps[name]) == 200 and min(gaps[name][29:185]) > 0
