"""The whole step in one graph: trained against eager, planted faults, what cannot be joined, schedules and replay."""

import re

import pytest
import torch
from on_ranks import insert
from torch import nn

from lab.whole_step.whole_steps import forgets_the_step_count, state
from workbench import ParallelPlan, WorkbenchError, World, author_module, capture, partition, run_partitioned
from workbench.graph.lower import bind
from workbench.lab.whole_step.join import PAIR, Update, join, require_joinable
from workbench.lab.whole_step.step import WholeStep
from workbench.torch_api import cuda_graphs
from workbench_lessons.l08_replay_with_cudagraphs.replay_rehearsal import Rehearsal

ALONE = World("gloo", 1, 0, torch.device("cpu"))


class MLP(nn.Module):
    """Two layers of one shape, and a buffer that each step writes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y):
        self.seen.add_(1)
        return ((self.down(torch.relu(self.up(x))) - y) ** 2).sum()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def model():
    torch.manual_seed(0)
    return MLP()


def authored(module=None):
    return author_module(module or model(), ALONE, None, ParallelPlan(), batch=lambda: batch(0))


def joined(update=None):
    found = join(partition(capture(authored())), update or Update())
    bind(found)
    return found


def adamw(module, lr=1e-2, **options):
    return torch.optim.AdamW(module.parameters(), lr=torch.tensor(lr, dtype=torch.float64), fused=True, **options)


def whole(update=None, **options):
    found = joined(update)
    module = found.pair.authored.module
    return WholeStep(found, adamw(module, **options))


def eager(steps=5, update=None):
    """(losses and norms, state) of the loop that the whole step must equal."""
    module, update = model(), update or Update()
    optimizer = adamw(module)
    seen = []
    for i in range(steps):
        loss = module(*batch(i))
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        if update.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), update.clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), float(norm)))
    return seen, state(module, optimizer)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("update", [Update(clip=None), Update(clip=0.1, skip=True)], ids=str)
def test_five_steps_are_the_eager_loop_s_bitwise(update):
    step = whole(update)
    seen = [tuple(map(float, step(*batch(i)))) for i in range(5)]
    wanted, left = eager(update=update)
    assert seen == wanted and equal(state(step.module, step.optimizer), left)
    assert float(step.module.seen) == 5 and step.optimizer.state[step.module.up.weight]["step"] == 5


def update_of(gm):
    (update,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._fused_adamw_.tensor_lr)
    return update


def takes_gradients(gm, *changed):
    """The update takes these in place of as many of its gradients."""
    update = update_of(gm)
    update.args = (update.args[0], [*changed, *update.args[1][len(changed):]], *update.args[2:])


def leaves_a_gradient_out_of_the_norm(gm):
    stack = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.stack.default)[-1]
    stack.args = (stack.args[0][1:], *stack.args[1:])


def swaps_two_gradients(gm):
    up, bias, down, _ = update_of(gm).args[1]
    takes_gradients(gm, down, bias, up)


def lays_out_a_gradient_otherwise(gm):
    """It has the same elements in the memory order of its transpose."""
    gradient = update_of(gm).args[1][0]
    transposed = insert(gm, gradient, torch.ops.aten.t_copy.default, gradient)
    takes_gradients(gm, insert(gm, transposed, torch.ops.aten.t.default, transposed))


def forgets_a_parameter(gm):
    update = update_of(gm)
    lists = [tensors[1:] for tensors in update.args[:4]]
    update.args = (*lists, [], update.args[5][1:], *update.args[6:])


def reads_a_parameter_late(gm):
    """The loss has the sum of an updated parameter in it."""
    update, output = update_of(gm), gm.graph.output_node()
    loss, norm = output.args[0]
    total = insert(gm, update, torch.ops.aten.sum.default, update.args[0][0])
    output.args = ((insert(gm, total, torch.ops.aten.add.Tensor, loss, total), norm),)


FAULTS = [
    (leaves_a_gradient_out_of_the_norm, "the norm leaves out the gradient of 'up.weight'"),
    (forgets_the_step_count, "the step count is not advanced"),
    (swaps_two_gradients, "parameter 'up.weight' is updated from the gradient of 'down.weight'"),
    (lays_out_a_gradient_otherwise, "the gradient of 'up.weight' has strides (1, 4), and the parameter (4, 1): the "
                                    "fused AdamW would pair"),
    (forgets_a_parameter, "parameter 'up.weight' is updated 0 times"),
    (reads_a_parameter_late, "up.weight is read by sum_default after _fused_adamw_"),
]


def test_a_planted_fault_fails_lint_and_changes_the_values():
    update = Update(clip=0.1)
    wanted, left = eager(2, update)
    for fault, said in FAULTS:
        step = whole(update)
        fault(step.split.graph)
        step.split.graph.recompile()
        lint = step.split.verdicts()[0]
        assert lint.outcome == "FAIL" and said in "; ".join(lint.evidence["problems"])
        bind(step.split)
        seen = [tuple(map(float, step(*batch(i)))) for i in range(2)]
        assert seen != wanted or not equal(state(step.module, step.optimizer), left), fault


def loads_the_state_of_a_larger_model(step):
    loaded = {"step": torch.tensor(1.0), "exp_avg": torch.ones(4, 4), "exp_avg_sq": torch.ones(8)}
    step.optimizer.state[step.module.up.weight] = loaded


def replaces_a_parameter(step):
    step.module.up.weight = nn.Parameter(step.module.up.weight.detach().clone())


CHANGES = [
    (lambda step: torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 0.1, total_steps=9),
     "joined for AdamW with betas (0.9, 0.999), and this AdamW has (0.95, 0.999): give the same to both, or set"),
    (lambda step: step.optimizer.param_groups[0].update(weight_decay=0.5), "weight_decay 0.01, and this AdamW has 0.5"),
    (lambda step: step.optimizer.param_groups[0].update(maximize=True), "maximize False, and this AdamW has True"),
    (lambda step: step.optimizer.load_state_dict(adamw(model(), eps=0.1).state_dict()),
     "eps 1e-08, and this AdamW has 0.1"),
    (lambda step: step.optimizer.state[step.module.up.weight].update(step=torch.tensor(3.0)),
     "the whole step of MLP: the optimizer's parameters have taken [1.0, 3.0] steps, and one graph counts them "
     "together: load a state of one step"),
    (loads_the_state_of_a_larger_model,
     "exp_avg_sq of parameter 'up.weight' is float32 [8] in the optimizer's state, and float32 [4, 4] in the graph: "
     "load the state of an AdamW of this module"),
    (replaces_a_parameter, "the optimizer does not hold parameter 'up.weight' of the module: give it all parameters, "
                           "and make the step"),
]


def test_what_the_graph_holds_as_a_constant_is_refused_at_the_next_call():
    split = joined()
    module = split.pair.authored.module
    for change, message in CHANGES:
        step = WholeStep(split, adamw(module))
        step(*batch(0))
        change(step)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        with pytest.raises(WorkbenchError, match=re.escape(message)):
            step(*batch(1))
        assert all(map(torch.equal, before, module.parameters()))


def test_a_replaced_state_and_a_kept_learning_rate_are_followed_bitwise():
    """Both sides get another `exp_avg`, and another learning rate through the tensor that the optimizer was made of, as
    from a schedule: the graph reads it at one address.
    """
    step, module = whole(), model()
    body, rates_read = step.split.slots[0].body, []
    bind(step.split, (lambda args: rates_read.append(args[-1]) or body(args),))
    optimizer = adamw(module)
    rates = [ours.param_groups[0]["lr"] for ours in (step.optimizer, optimizer)]
    for i in range(3):
        step(*batch(i))
        module(*batch(i)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for ours, trained, rate in zip((step.optimizer, optimizer), (step.module, module), rates, strict=True):
            ours.state[trained.up.weight]["exp_avg"] = torch.full((4, 4), 0.25)
            rate.fill_(0.5 ** i)
    assert equal(state(step.module, step.optimizer), state(module, optimizer))
    assert len(set(map(id, rates_read))) == 1


class Two(MLP):
    def forward(self, x, y):
        loss = super().forward(x, y)
        return loss, loss * 2


def captured_and_joined(found):
    join(partition(capture(found)), Update())


def test_what_cannot_be_joined_is_refused():
    """Tied and frozen parameters before the capture; what shows only in the graph, by the join."""
    tied, frozen, unused, two = model(), model(), model(), Two()
    tied.down.weight = tied.up.weight
    frozen.up.bias.requires_grad_(False)
    unused.spare = nn.Parameter(torch.zeros(2))
    for module, refuse, message in [
        (tied, require_joinable, "'up.weight' and 'down.weight' are one parameter (tied weights), which a joined graph "
                                 "would update twice: untie them"),
        (frozen, require_joinable, "parameter 'up.bias' is frozen, and a joined graph updates every parameter: set "
                                   "requires_grad to True"),
        (unused, captured_and_joined, "parameter 'spare' gets no gradient, and every parameter must: use it in the "
                                      "loss, drop it"),
        (two, captured_and_joined, "the module returns 2 results, and a whole step takes one loss: return the loss "
                                   "alone"),
    ]:
        with pytest.raises(WorkbenchError) as told:
            refuse(authored(module))
        assert str(told.value).startswith("the whole step of ")
        assert str(told.value).endswith(f"{message}, or {PAIR}")


def two_rates(module):
    groups = [{"params": list(part.parameters()), "lr": torch.tensor(lr)}
              for part, lr in ((module.up, 0.1), (module.down, 0.2))]
    return torch.optim.AdamW(groups, fused=True)


def test_an_optimizer_that_is_not_supported_is_refused():
    found = joined()
    for make, message in [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "joined for AdamW with betas .*, and this SGD has None"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.01),
         "joined for AdamW with decoupled_weight_decay True, and this Adam has False"),
        (lambda m: adamw(m.up), "the optimizer does not hold parameter 'down.weight'"),
        (two_rates, "the optimizer's groups have 2 learning rates, and one graph has one"),
    ]:
        with pytest.raises(WorkbenchError, match=message):
            WholeStep(found, make(found.pair.authored.module))(*batch(0))


def test_one_recording_replays_the_whole_step_bitwise(monkeypatch):
    stand = Rehearsal()
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda: stand)
    step = whole()
    (record,), (body,) = run_partitioned(step.split, ["cudagraph"])
    bind(step.split, (body,))
    seen = [tuple(map(float, step(*batch(i)))) for i in range(5)]
    wanted, left = eager()
    assert seen == wanted and equal(state(step.module, step.optimizer), left)
    assert stand.recorded == 1 and body.replays == 3 and record.parts == ("step",)
    moved = [name for name, fixed in zip(body.names, body.fixed, strict=True) if not fixed]
    assert len(moved) == 2  # x and y: parameters, buffers, states, step count and learning rate stay in place
    step.close()
