"""cudagraph: recording, replaying and what is refused; on the CPU with its rehearsal."""

from functools import partial

import pytest
import torch
from on_ranks import FSDP4, small
from torch import nn

from workbench import World, author_module, capture, partition, run_partitioned
from workbench.checks.verdicts import Outcome
from workbench.errors import WorkbenchError
from workbench.graph.lower import compile_step
from workbench.pipeline import build as pipeline
from workbench.recipe.sections import PassSpec
from workbench.torch_api import cuda_graphs
from workbench_lessons.l08_replay_with_cudagraphs import replay_rehearsal
from workbench_lessons.l08_replay_with_cudagraphs.replay_rehearsal import Rehearsal

ALONE = World("gloo", 1, 0, torch.device("cpu"))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, y):
        return ((self.down(torch.relu(self.up(x))) * self.scale - y) ** 2).mean()


def batch(seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(3, 4, generator=generator).to(device) for _ in range(2))


@pytest.fixture
def stand(monkeypatch):
    made = Rehearsal()
    monkeypatch.setattr(cuda_graphs, "Recorder", lambda: made)
    return made


def build(*specs, module=None, world=ALONE):
    """(step, records) of the MLP on one rank, with the passes given."""
    torch.manual_seed(0)
    batches = partial(batch, 0, world.device)
    pair = partition(capture(author_module(module or MLP(), world, None, batch=batches)))
    records, bodies = run_partitioned(pair, [PassSpec.model_validate(spec) for spec in specs])
    return compile_step(pair, bodies), records


def train(step, steps=6, keep=False, device="cpu"):
    """Losses and gradients of some steps, copied; parameters move in place. A loss is the user's to keep."""
    seen, losses = [], []
    for seed in range(steps):
        loss = step(*batch(seed, device))
        loss.backward()
        losses.append(loss)
        parameters = list(step.module.parameters())
        seen.append([loss.detach().clone(), *(p.grad.clone() for p in parameters)])
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.grad
        if not keep:
            step.module.zero_grad(set_to_none=True)
    assert [loss.item() for loss in losses] == [values[0].item() for values in seen]
    return seen


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.fixture(scope="module")
def plain():
    """What six steps without the pass give."""
    return train(build()[0])


def test_warm_up_then_record_then_replay_bitwise(stand, plain):
    step, (record,) = build({"name": "cudagraph", "warmup": 3})
    forward, backward = record.after
    assert record.outcome is Outcome.UNKNOWN and "nothing was replayed yet" in record.verdict("effect").message
    with pytest.raises(WorkbenchError, match="nothing is recorded yet: run 4 steps first"):
        forward.replay_alone()
    # parameters and the buffer stay where they are, x and y are copied; then saved tensors stay, the tangent is copied
    static, copied = forward.facts.static, forward.facts.copied
    assert [x.parameter for x in static] == ["up.weight", "up.bias", "down.weight", "down.bias", "scale"]
    assert [(x.shape, x.bytes) for x in copied] == [((3, 4), 48)] * 2
    assert [(x.shape, x.bytes, x.parameter) for x in backward.facts.copied] == [((), 4, "")]
    assert {forward.facts.pool_bytes, backward.facts.pool_bytes} == {None}
    calls = [n for n in record.before[0].graph.graph.nodes if n.op == "call_function"]
    assert 5 <= forward.facts.launches_before < len(calls)  # the transposes start nothing
    assert same(train(step), plain)
    assert stand.recorded == 2
    found = record.verdict("effect")
    assert found.outcome is Outcome.PASS and found.evidence["replays"] == [3, 3]
    assert found.evidence["copied_inputs"] == [2, 1] and found.evidence["fixed_inputs"][0] == 5
    assert (forward.facts.pool_bytes, backward.facts.pool_bytes) == (148, 452)  # its outputs
    assert {x.address for x in forward.facts.inputs} == {None}  # a CPU's addresses are nobody's business
    forward._outputs[0].fill_(7.0)
    forward.replay_alone()
    assert forward._outputs[0] != 7.0


def test_what_is_held_is_not_overwritten_in_silence_and_after_close_a_call_is_refused(stand):
    step, _ = build("cudagraph")
    train(step, 4)
    with pytest.raises(WorkbenchError, match=r"a gradient of the last step is still held, .*zero_grad"):
        train(step, 2, keep=True)
    step.module.zero_grad(set_to_none=True)
    loss = step(*batch(0))
    with pytest.raises(WorkbenchError, match="what the last step saved is still held"):
        step(*batch(1))
    loss.backward()
    step.close()
    step.close()
    assert stand.closed == 2  # each body once
    with pytest.raises(WorkbenchError, match="it is closed: build the step again"):
        step(*batch(0))


def test_a_backward_that_runs_twice_does_not_record_before_its_forward(stand):
    def twice(step):
        loss = step(*batch(9))
        loss.backward(retain_graph=True)
        loss.backward()
        step.module.zero_grad(set_to_none=True)
        return train(step, keep=True)  # in gradients that lie elsewhere

    with torch._functorch.config.patch(donated_buffer=False):
        assert same(twice(build("cudagraph")[0]), twice(build()[0]))


class SharesMemory(Rehearsal):
    """As a GPU's recorder: what is recorded in memory of an input holds it. The inputs are as they were afterwards."""

    def record(self, body, inputs):
        was = [value.clone() for value in inputs]
        outputs, fixed = list(body(list(inputs))), [replay_rehearsal._at_address(value) for value in inputs]
        for value, before in zip(inputs, was, strict=True):
            value.data.copy_(before)

        def replay():
            for kept, new in zip(outputs, body(list(fixed)), strict=True):
                if kept is not None:  # x and y take no gradient
                    kept.data.copy_(new)

        return replay, outputs


def over_what_was_saved(plain):
    """A backward that writes a gradient into memory of the forward, as Inductor's does where both have one size."""

    def body(args):
        saved = next(value for value in args if tuple(value.shape) == (3, 8))
        outputs = list(plain(args))
        index = next(i for i, value in enumerate(outputs) if tuple(value.shape) == (8,))
        outputs[index] = torch.empty(0).set_(saved.untyped_storage(), 0, (8,)).copy_(outputs[index])
        return outputs

    return body


def test_a_gradient_that_is_written_over_what_was_saved_is_right_and_not_overwritten_in_silence(monkeypatch, plain):
    monkeypatch.setattr(cuda_graphs, "Recorder", SharesMemory)
    step, (record,) = build("cudagraph")
    backward = record.after[1].body
    backward.function = over_what_was_saved(backward.function)
    assert same(train(step), plain)
    step(*batch(0)).backward()
    kept = step.module.up.bias.grad
    was = kept.clone()
    step.module.zero_grad(set_to_none=True)
    with pytest.raises(WorkbenchError, match=r"on the forward graph: a gradient of the last step is still held"):
        step(*batch(1))
    assert torch.equal(kept, was)


@pytest.mark.parametrize("debug", [False, True])
def test_a_replay_reads_the_memory_that_was_recorded_and_debug_finds_a_parameter_that_moved(stand, debug):
    step, _ = build({"name": "cudagraph", "debug": debug})
    train(step, 4)
    before, weight = step(*batch(0)).item(), step.module.up.weight
    weight.data = torch.zeros_like(weight)
    if debug:
        with pytest.raises(WorkbenchError, match="input primals_1 was recorded at address 0x.*change parameters"):
            step(*batch(0))
    else:
        assert step(*batch(0)).item() == before  # still what lies at the old address


class Noisy(MLP):
    def forward(self, x, y):
        return super().forward(nn.functional.dropout(x, 0.5), y)


def test_random_numbers_are_refused_by_name(stand):
    with pytest.raises(WorkbenchError, match=r"on the forward graph: \w+ draws random numbers"):
        build("cudagraph", module=Noisy())


def test_a_fake_world_shows_the_passes_before_it(fake4):
    built = pipeline.build(small(FSDP4, (), ("transformer_block_bucketing", "cudagraph")), fake4)
    buckets, recorded = built.records
    assert buckets.outcome is Outcome.PASS and recorded.verdict("effect").outcome is Outcome.UNKNOWN


def test_it_needs_cuda():
    with pytest.raises(WorkbenchError, match=r"^pass 'cudagraph' needs CUDA \(it runs on a GPU only\), and world gloo"):
        pipeline.check_buildable(small(FSDP4, (), ("cudagraph",)), "gloo")


@pytest.mark.gpu
def test_one_gpu_replays_bitwise():
    """The same MLP on a GPU, with the real recorder."""
    gpu = World("nccl", 1, 0, torch.device("cuda", 0))
    plain = train(build(world=gpu)[0], device=gpu.device)
    step, (record,) = build("cudagraph", world=gpu)
    assert same(train(step, device=gpu.device), plain)
    assert record.outcome is Outcome.PASS
    forward, backward = (body.facts for body in record.after)
    places = {name: value.data_ptr() for name, value in step.module.named_parameters()}
    assert {x.parameter: x.address for x in forward.static if x.parameter != "scale"} == places
    assert all(x.address for x in (*forward.inputs, *backward.inputs))
    assert 0 < forward.pool_bytes <= backward.pool_bytes < 2**30
    step.close()
