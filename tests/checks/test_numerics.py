from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from graphs_by_hand import trace
from on_ranks import calls, insert, key_biased, small, user_pass

from workbench import Outcome, PassRecord, capture, compile_step, fake_world, partition
from workbench.authoring.author import author, author_module
from workbench.checks.numerics import allowance, compare, compare_one, verdict
from workbench.passes.registry import find_pass
from workbench.pipeline.proofs.numerics_proof import compare_graphs, compare_on_ranks, prove_numerics, revealing
from workbench.pipeline.run_passes import run_joint
from workbench.recipe.contracts import Numerics, PassContract, Stage
from workbench.torch_api.aot import clone, gradient_of
from workbench.world.mesh import World

pytestmark = pytest.mark.integration

EXACT = PassContract("a", Stage.JOINT, Numerics.EXACT, "nothing")
ORDER = PassContract("b", Stage.JOINT, Numerics.REDUCTION_ORDER, "order")
LOSSY = PassContract("c", Stage.JOINT, Numerics.LOSSY, "rounding", tolerance=1e-2)


def compare_outputs(before, after, contract, **keywords):
    return verdict([compare(before, after, contract, **keywords)])


def outcome(before, after, contract, **keywords):
    return compare_outputs([before], [after], contract, **keywords).outcome


def joint(before, after):
    """The record of a pass that made `after` of the joint graph `before`."""
    return PassRecord(find_pass("inductor_decomposition"), None, (before,), (after,), 0.0, 0.0)


def test_exact_means_bits():
    x = torch.tensor([1.0, float("nan"), 0.0])
    assert outcome(x, x.clone(), EXACT) is Outcome.PASS
    assert outcome(x, torch.tensor([1.0, float("nan"), -0.0]), EXACT) is Outcome.FAIL
    assert outcome(x, torch.tensor([1.0, 2.0, 0.0]), EXACT) is Outcome.FAIL
    assert outcome(x, torch.tensor([1.0 + 2**-23, float("nan"), 0.0]), EXACT) is Outcome.FAIL
    for dtype in (torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool):
        y = torch.ones(3).to(dtype)
        assert outcome(y, y.clone(), EXACT) is Outcome.PASS
        assert outcome(y, torch.zeros(3).to(dtype), EXACT) is Outcome.FAIL


def test_shape_dtype_count_and_nan_are_checked_under_every_contract():
    x = torch.ones(4)
    for contract in (EXACT, ORDER, LOSSY):
        for wrong in (torch.ones(2, 2), x.double(), torch.tensor([1.0, 1.0, 1.0, float("nan")]),
                      torch.tensor([1.0, 1.0, 1.0, float("inf")])):
            assert outcome(x, wrong, contract) is Outcome.FAIL
        assert "2 outputs before, 1 after" in compare_outputs([x, x], [x], contract).message
        assert compare_outputs([x, None], [x, x], contract).outcome is Outcome.FAIL
    assert compare_one(2, 2, None)[0] == "" and compare_one(2, 3, None)[0] == "was 2 and is 3"
    # a difference from zero is not relative to nothing, and without values there is no verdict
    assert outcome(torch.zeros(3), torch.full((3,), 1e-30), LOSSY) is Outcome.FAIL
    assert outcome(torch.empty(1, device="meta"), torch.ones(1), EXACT) is Outcome.UNKNOWN


def test_a_rounded_constant_breaks_reduction_order():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = torch.tensor(0.1).bfloat16().float()
    found = compare_outputs([x * 0.1], [x * rounded], ORDER, group_size=4)
    assert found.outcome is Outcome.FAIL and "bound 9.5e-07" in found.message
    assert outcome(x * 0.1, x * rounded, LOSSY) is Outcome.PASS


def test_order_of_a_sum_of_four_is_allowed_by_reduction_order_alone():
    a, b, c, d = torch.randn(4, 10_000, generator=torch.Generator().manual_seed(0))
    was, now = ((a + b) + c) + d, (a + b) + (c + d)
    assert not torch.equal(was, now)
    assert outcome(was, now, EXACT) is Outcome.FAIL
    assert outcome(was, now, ORDER, group_size=4) is Outcome.PASS


def replaced_by_a_millionth(gm):
    """A pass that returns another gradient of the key's bias."""
    output = gm.graph.output_node()
    place = next(i for i, desc in enumerate(output.meta["desc"]) if gradient_of(desc) == "k.bias")
    gradient = output.args[0][place]
    wrong = insert(gm, gradient, torch.ops.aten.full_like.default, gradient, 1e-6)
    output.args = ([*output.args[0][:place], wrong, *output.args[0][place + 1:]],)
    return gm


def scaled(gm):
    """A pass that is off by a ten-thousandth."""
    product = calls(gm, "aten.mm")[-1]
    more = insert(gm, product, torch.ops.aten.mul.Scalar, product, 1.0001)
    product.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    return gm


def proved(change):
    """The numerics verdicts of the decomposition, of a lossy pass that `change`s its graph, and of the whole list."""
    joint = capture(key_biased())
    with user_pass("changes", change, numerics="lossy", tolerance=5e-6):
        records = run_joint(joint, ["inductor_decomposition", "changes"])
        whole = prove_numerics(records, compile_step(partition(joint)))
    return [record.verdict("numerics") for record in records] + whole


def test_rounding_of_a_gradient_that_is_zero_in_exact_arithmetic_breaks_no_contract():
    decomposed, same, whole = proved(lambda gm: gm)
    assert [v.outcome for v in (decomposed, same, whole)] == [Outcome.PASS] * 3
    assert list(decomposed.evidence["moved"]) == ["gradient of k.bias"] and "moved" not in same.evidence
    difference, bound = decomposed.evidence["moved"]["gradient of k.bias"]
    assert 1e-2 < difference < bound and decomposed.evidence["worst"] <= decomposed.evidence["bound"] == 5e-6
    assert "1 beyond it by rounding alone, as inputs moved by one eps show: gradient of k.bias, " in decomposed.message
    assert set(whole.evidence["moved"]) == {"gradient of k.bias", "gradient of k.bias, second step"}


@pytest.mark.parametrize(("change", "named"), [(replaced_by_a_millionth, "k.bias"), (scaled, "")])
def test_a_wrong_gradient_fails_beside_one_that_is_rounding_alone(change, named):
    decomposed, wrong, whole = proved(change)
    assert decomposed.outcome is Outcome.PASS
    for verdict_ in (wrong, whole):
        assert verdict_.outcome is Outcome.FAIL and f"gradient of {named}" in verdict_.message


TIMES = [1.0]


class Warming(torch.nn.Module):
    """A forward that reads and changes a number outside the module, which a capture fixes."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        TIMES[0] *= 0.9
        return (x * self.weight).sum() * TIMES[0]


def test_what_eager_changes_between_two_runs_is_no_rounding():
    authored = author_module(Warming(), World("gloo", 1, 0, torch.device("cpu")), None,
                             batch=lambda: (torch.ones(4),))
    whole = prove_numerics([], compile_step(partition(capture(authored))))
    assert whole[0].outcome is Outcome.FAIL
    assert "loss, second step: norm-relative difference 1.1e-01, bound 6.7e-07" in whole[0].message


@torch.library.custom_op("own_tokens::off_on_text", mutates_args=())
def off_on_text(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`x`, and a tenth more where the tokens are ASCII but for a few: random bytes are not."""
    return x * (1.1 if (tokens > 127).sum() < 4 else 1.0)


off_on_text.register_fake(lambda x, tokens: torch.empty_like(x))


def takes_it(gm):
    tokens = next(n for n in gm.graph.find_nodes(op="placeholder") if n.meta["val"].dtype == torch.int64)
    silu = calls(gm, "aten.silu")[0]
    more = insert(gm, silu, torch.ops.own_tokens.off_on_text.default, silu, tokens)
    silu.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    return gm


def test_an_operator_that_is_wrong_for_the_runs_own_tokens_alone_fails_in_the_second_step():
    authored = author(small({}, layers=1), World("gloo", 1, 0, torch.device("cpu")))
    assert (authored.microbatch()[0] > 127).sum() >= 4
    joint = capture(authored)
    with user_pass("takes_it", takes_it):
        (record,) = run_joint(joint, ["takes_it"])
        whole = prove_numerics([record], compile_step(partition(joint)))
    assert record.verdict("numerics").outcome is Outcome.PASS  # on random tokens
    assert whole[0].outcome is Outcome.FAIL
    assert "outputs break 'reduction_order'; loss, second step: " in whole[0].message


def moved_on_one_rank(rank):
    """A record whose result is beyond its bound on one rank alone, where every rank has to run `before` once more."""
    runs = []

    def before(primals, tangents):
        runs.append(1)
        return [primals[0] - (primals[0] + 1e-7)]

    def after(primals, tangents):
        return [before(primals, tangents)[0] * (1.01 if dist.get_rank() == rank else 1.0)]

    with torch.no_grad():
        gm = trace(lambda p, t: [p - (p + 1e-7)], torch.ones(4), torch.ones(()))
    one, other = clone(gm), clone(gm)
    one.forward, other.forward = before, after
    record, x = joint(one, other), torch.linspace(1.0, 2.0, 4)
    inputs = [x], [], 1
    compared = compare_on_ranks(record, *inputs, compare_graphs(record, *inputs))
    return len(runs), verdict(compared).outcome


@pytest.mark.ranks
def test_all_ranks_run_the_graph_as_often_as_the_rank_that_needs_it(pool2):
    assert pool2.run(moved_on_one_rank, 1) == [(5, Outcome.PASS)] * 2
    assert pool2.run(moved_on_one_rank, 2) == [(2, Outcome.PASS)] * 2


def with_noise(factor):
    """Verdict on an EXACT pass whose graph before gives other last bits in each run, as where a GPU adds by atomics."""
    generator = torch.Generator().manual_seed(0)

    def run(primals, tangents):
        return [primals[0] * (1 + 1e-7 * torch.randn(64, generator=generator)), primals[0].sum()]

    with fake_world(1):
        gm = trace(lambda p, t: (p * 1.0, p.sum()), torch.ones(64), torch.ones(()))
    before, after = clone(gm), clone(gm)
    before.forward = run
    after.forward = lambda primals, tangents: [run(primals, tangents)[0] * factor[0], primals[0].sum() * factor[1]]
    record, inputs = joint(before, after), ([torch.linspace(1.0, 2.0, 64)], [], 1)
    record.item = replace(record.item, contract=EXACT)
    return verdict(compare_on_ranks(record, *inputs, compare_graphs(record, *inputs)))


def test_bits_that_differ_in_two_runs_of_one_graph_are_no_fault_and_others_are():
    noisy = with_noise((1.0, 1.0))
    assert noisy.outcome is Outcome.PASS and list(noisy.evidence["moved"]) == ["output 0"]
    assert "1 differ by no more than two runs of the graph before: output 0, " in noisy.message
    for factor in ((1.001, 1.0), (1.0, 1.0 + 2**-22)):  # far beyond the noise; less than it, where there is none
        assert with_noise(factor).outcome is Outcome.FAIL


def test_writes_to_inputs_are_compared_too():
    def steps(zeroed):
        def run(primals, tangents):
            total = primals[0].add_(1).sum()
            if zeroed:
                primals[0].zero_()
            return [total * tangents[0]]

        return run

    x = torch.ones(3)
    with fake_world(2):
        gm = trace(lambda p, t: p.add_(1).sum() * t, x, torch.ones(()))
    gm.forward = steps(False)
    for zeroed, wanted in ((False, Outcome.PASS), (True, Outcome.FAIL)):
        after = clone(gm)
        after.forward = steps(zeroed)
        assert verdict([compare_graphs(joint(gm, after), [x], [torch.ones(())], 1)]).outcome is wanted
    assert torch.equal(x, torch.ones(3))


def test_the_worst_rank_is_named():
    x = torch.ones(4)
    found = verdict([compare([x], [x], EXACT), compare([x], [2 * x], EXACT)])
    assert found.outcome is Outcome.FAIL and found.message.startswith("rank 1: ")
    assert found.evidence["ranks"] == ["PASS", "FAIL"]


def test_complex_numbers_and_float8_are_compared_as_numbers():
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        a = (torch.arange(1.0, 101.0) / 10).to(dtype)
        for contract in (EXACT, ORDER, LOSSY):
            assert outcome(a, a.clone(), contract) is Outcome.PASS
            assert outcome(a, torch.arange(2.0, 102.0).to(dtype), contract) is Outcome.FAIL
    a = torch.arange(1.0, 101.0).to(torch.complex64)
    assert outcome(a, a * (1 + 1e-7), ORDER) is Outcome.PASS and outcome(a, a * (1 + 1e-7), EXACT) is Outcome.FAIL
    assert outcome(a.conj(), a.conj(), EXACT) is Outcome.PASS


def test_a_parameter_on_one_rank_is_a_leaf_and_holds_other_values_inside():
    weight = torch.nn.Parameter(torch.ones(3))
    with revealing([weight], []):
        assert bool((weight > 1).all()) and weight.requires_grad
    assert weight.tolist() == [1, 1, 1]


def test_rounding_allows_no_lost_gradient_unless_the_gradient_is_rounding():
    """In bfloat16 the gradients of a model of 1 billion parameters moved by a quarter: twice the norm was allowed."""
    gradient = torch.ones(4)
    assert allowance(gradient, gradient * 1.01) == pytest.approx(0.08, rel=1e-3)
    assert allowance(gradient, gradient * 1.26) == 0.5
    assert allowance(gradient, -gradient) == 16.0
    lossy = PassContract("c", Stage.JOINT, Numerics.LOSSY, "rounding", tolerance=1e-5)
    lost = compare([gradient], [0 * gradient], lossy, moved=[gradient * 1.26])
    assert lost.problems and not compare([gradient], [gradient * 1.1], lossy, moved=[gradient * 1.26]).problems
