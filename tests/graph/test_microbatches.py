"""Several microbatches in one graph, on one rank: against a loop that accumulates, planted faults, what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from step_faults import adds_up_without_the_mean, reads_the_first_microbatch_again
from torch import nn
from torch.distributed import _functional_collectives as collectives
from whole_steps import experts, state

from workbench import author_module, capture, partition, run_partitioned
from workbench.authoring.author import author
from workbench.authoring.microbatches import accumulate
from workbench.authoring.plans import ParallelPlan
from workbench.checks import joining
from workbench.errors import WorkbenchError
from workbench.graph.microbatches import gradients_of
from workbench.graph.replay_rehearsal import Rehearsal
from workbench.graph.step_graph import join
from workbench.graph.update import Update
from workbench.graph.whole_step import WholeStep
from workbench.torch_api import aot, cuda_graphs
from workbench.world.fake import fake_world
from workbench.world.mesh import World

ALONE = World("gloo", 1, 0, torch.device("cpu"))
ROWS = 3


class MLP(nn.Module):
    """A buffer that each forward writes, and one that counts what the last forward saw."""

    summed_buffers = ("rows",)

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x, y):
        self.seen.add_(1).mul_(2)
        self.rows.copy_((x > 0).sum())
        return ((self.down(torch.relu(self.up(x))) - y) ** 2).mean() * self.seen


def batch(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count * ROWS, 4, generator=generator), torch.randn(count * ROWS, 4, generator=generator)


def model(kind=MLP):
    torch.manual_seed(0)
    return kind()


def joined(count, update=None, module=None, example=None):
    authored = author_module(module or model(), ALONE, None, ParallelPlan(), batch=lambda: example or batch(0, 1))
    return join(partition(capture(authored)), update or Update(), microbatches=count)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-2, dtype=torch.float64), fused=True)


def whole(count, update=None):
    found = joined(count, update)
    found.body = aot.boxed(found.graph)
    return WholeStep(found, adamw(found.pair.authored.module))


def eager(count, steps=5, update=None):
    """The loop as one writes it by hand: each microbatch's loss over their number, and gradients that autograd adds."""
    module, update = model(), update or Update()
    optimizer, seen = adamw(module), []
    for i in range(steps):
        losses, rows = [], 0
        for part in zip(*(value.chunk(count) for value in batch(i, count)), strict=True):
            loss = module(*part)
            (loss / count).backward()
            losses.append(loss.detach())
            rows = rows + module.rows.clone()
        module.rows.copy_(rows)
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        if update.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), update.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(sum(losses) / count), float(norm)))
    return seen, state(module, optimizer)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("update", [Update(), Update(clip=None), Update(clip=0.1, skip=True)], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_five_steps_are_the_accumulating_loop_s_bitwise(count, update):
    step = whole(count, update)
    seen = [tuple(map(float, step(*batch(i, count)))) for i in range(5)]
    wanted, left = eager(count, update=update)
    assert seen == wanted and equal(state(step.module, step.optimizer), left)
    checked = joining.of_joined(step.joined)
    assert [str(v.outcome) for v in checked] == ["PASS", "PASS"]
    assert checked[0].evidence["accumulated_bytes"] == 4 * sum(p.numel() for p in step.module.parameters())


def test_the_workbench_s_own_loop_is_that_by_hand():
    module = model()
    loss = accumulate(module, batch(0, 2), 2)
    (wanted, norm), *_ = eager(2, 1)[0]
    assert float(loss) == wanted and module.rows == int((batch(0, 2)[0] > 0).sum()) and module.seen == 6
    assert float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])) == norm


def the_sum(step):
    """The first sum of gradients and its terms, as nodes."""
    nodes = {node.name: node for node in step.joined.graph.graph.nodes}
    first, second = (nodes[name] for name in step.joined.terms[0])
    (total,) = (user for user in second.users if first in user.all_input_nodes)
    return first, second, total


def forgets_the_last(step):
    first, _, total = the_sum(step)
    total.replace_all_uses_with(first)


def forgets_the_first(step):
    _, second, total = the_sum(step)
    total.replace_all_uses_with(second)


def adds_the_last_twice(step):
    first, second, total = the_sum(step)
    total.args = (first, second)
    with step.joined.graph.graph.inserting_after(total):
        more = step.joined.graph.graph.call_function(total.target, (total, second))
    total.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)


def takes_the_first_for_the_last(step):
    first, _, total = the_sum(step)
    total.args = (first, first)


def reads_the_first_rows_again(step):
    reads_the_first_microbatch_again(step.joined.graph)


PATHS = r"\d+ paths? from \S+ of microbatch 1 to the update, and \d+ from \S+ of microbatch 0: each must count once"


@pytest.mark.parametrize(("fault", "said"), [
    (forgets_the_last, PATHS), (forgets_the_first, PATHS), (adds_the_last_twice, PATHS),
    (takes_the_first_for_the_last, PATHS),
    (reads_the_first_rows_again, r"\S+ of microbatch 1 reads the rows of microbatch 0"),
])
def test_a_planted_fault_fails_lint_and_changes_the_values(fault, said):
    step = whole(2)
    fault(step)
    step.joined.graph.recompile()
    lint = joining.of_joined(step.joined)[0]
    assert lint.outcome == "FAIL" and any(re.fullmatch(said, told) for told in lint.evidence["problems"])
    step.joined.body = aot.boxed(step.joined.graph)
    for i in range(2):
        step(*batch(i, 2))
    assert not equal(state(step.module, step.optimizer), eager(2, 2)[1])


def test_a_mean_that_is_not_taken_changes_the_norm():
    step = whole(2)
    adds_up_without_the_mean(step.joined.graph)
    step.joined.body = aot.boxed(step.joined.graph)
    _, norm = step(*batch(0, 2))
    assert float(norm) == pytest.approx(2 * eager(2, 1)[0][0][1])


def test_one_recording_replays_all_microbatches_bitwise(monkeypatch):
    stand = Rehearsal()
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda: stand)
    step = whole(2)
    _, (body,) = run_partitioned(step.joined, ["cudagraph"])
    step.joined.body = body
    seen = [tuple(map(float, step(*batch(i, 2)))) for i in range(5)]
    wanted, left = eager(2)
    assert seen == wanted and equal(state(step.module, step.optimizer), left)
    assert stand.recorded == 1 and body.replays == 3
    step.close()


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_microbatches_that_is_none_is_refused(count):
    with pytest.raises(WorkbenchError) as told:
        joined(count)
    assert str(told.value) == f"join(..., microbatches={count!r}): it must be a whole number, 1 or more"


def test_a_batch_of_other_rows_is_refused():
    step = whole(2)
    for count in (1, 3):
        with pytest.raises(WorkbenchError) as told:
            step(*batch(0, count))
        assert str(told.value) == (
            "the whole step of MLP takes a batch of 2 microbatches, of shapes [[6, 4], [6, 4]], and got "
            f"[[{3 * count}, 4], [{3 * count}, 4]]: give a whole batch")
    step(*batch(0, 2))


class Scaled(MLP):
    def forward(self, x, factor):
        return super().forward(x, x) * factor


def test_an_input_that_cannot_be_cut_is_refused():
    with pytest.raises(WorkbenchError) as told:
        joined(2, module=model(Scaled), example=(torch.randn(3, 4), torch.tensor(2.0)))
    assert re.fullmatch(r"the whole step of Scaled: input \S+ has no first dim to cut into 2 microbatches: give it "
                        'one, or set training.step to "pair"', str(told.value))


class Normalised(torch.autograd.Function):
    """The backward divides a gradient by its sum over the ranks, which is not linear."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = collectives.all_reduce(gradient, "sum", ctx.group)
        return gradient / (1 + total * total), None


class Odd(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.up, self.group = nn.Linear(4, 4, bias=False), group

    def forward(self, x, y):
        return ((Normalised.apply(self.up(x), self.group) - y) ** 2).mean()


def refusal(pair):
    """What the join of two microbatches says."""
    with pytest.raises(WorkbenchError) as told:
        join(pair, Update(), microbatches=2)
    return str(told.value)


def test_a_backward_that_computes_with_reductions_is_refused():
    with fake_world(2) as world:
        authored = author_module(Odd(torch.distributed.group.WORLD.group_name), world, None, ParallelPlan(),
                                 batch=lambda: batch(0, 1))
        pair = partition(capture(authored))
        join(pair, Update())
        said = refusal(pair)
    assert re.fullmatch(r"the whole step of Odd: \S+ \(aten\.\w+\) reads a reduction over data-parallel ranks in the "
                        "backward, and only sums of gradients can be reduced once for several microbatches: drop it, "
                        'or set training.step to "pair"', said)


def test_a_gradient_that_is_written_in_place_is_refused():
    pair = partition(capture(author_module(model(), ALONE, None, ParallelPlan(), batch=lambda: batch(0, 1))))
    graph = pair.backward.graph
    gradient = next(iter(gradients_of(pair.backward).values()))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.mul_.Tensor, (gradient, 1.0)).meta["val"] = gradient.meta["val"]
    join(pair, Update())
    said = refusal(pair)
    assert re.fullmatch(r"the whole step of MLP: the backward writes into \S+, which holds gradients, in place, and a "
                        "step of several microbatches adds up new values: return a new tensor, or set training.step to "
                        '"pair"', said)


@pytest.mark.nightly
def test_sizes_that_are_read_from_the_device_are_refused():
    recipe = experts({"dp_shard": 2, "ep": 2}, **{"model.dispatch": "dropless"})
    with fake_world(2) as world:
        pair = partition(capture(author(recipe, world)))
        said = refusal(pair)
    assert re.fullmatch(r"the whole step of deepseek_v3: the size of \S+ is read from the device, and a step of "
                        "several microbatches needs sizes that are the same in all: give it a static size, or set "
                        'training.step to "pair"', said)
