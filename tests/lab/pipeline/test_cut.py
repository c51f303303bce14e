"""Stages of a joint graph: what crosses their borders, the passes that run on them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from blocks import Summed
from torch import nn

from lab.pipeline.pipelines import ALONE, COUNT, Skipping, captured, eager, small
from workbench import WorkbenchError, author, capture, fake_world, run_partitioned
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.nodes import is_backward
from workbench.graph.read.timeline import costs_of
from workbench.lab.pipeline.cut import cut_into_stages
from workbench.lab.pipeline.estimate import estimate
from workbench.lab.pipeline.phases import StageRun
from workbench.lab.pipeline.plan import plan
from workbench.lab.pipeline.transform import second_half
from workbench.torch_api.module_paths import module_path

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def joint():
    """Of four layers, on this process alone."""
    return capture(author(small(4), ALONE))


@pytest.mark.compat
def test_nothing_is_lost_and_blocks_are_alone(joint):
    """What crosses the borders: notebook 18."""
    cut = cut_into_stages(joint, ["layers.1", "layers.2", "layers.3"])
    trained = [set(StageRun(stage, joint.authored.module, False).gradients) for stage in cut.stages]
    assert set.union(*trained) == {name for name, _ in joint.authored.module.named_parameters()}
    assert sum(map(len, trained)) == len(set.union(*trained))
    for stage in cut.stages[1:3]:  # blocks alone
        paths = {module_path(n) for n in stage.pair.forward.graph.nodes if n.op == "call_function" and module_path(n)}
        assert paths and all(path.startswith(f"layers.{stage.number}") for path in paths)
    assert joint.graph.graph.find_nodes(op="placeholder") and not joint.closed


def unevenness(cut):
    """How far the slower of two stages is from the faster one, as estimated."""
    first, second = (sum(costs_of(stage.joint, "h100").compute.values()) for stage in cut.stages)
    return abs(first - second)


def test_stages_of_about_the_same_time_are_found(joint):
    even = unevenness(cut_into_stages(joint, 2))
    assert even == min(unevenness(cut_into_stages(joint, [f"layers.{i}"])) for i in (1, 2, 3))
    assert [stage.number for stage in cut_into_stages(joint, 4).stages] == [0, 1, 2, 3]


def test_a_value_that_a_later_stage_reads_is_sent_on_and_its_gradient_comes_back_bitwise():
    torch.manual_seed(0)
    batch = (torch.randn(COUNT, 4),)
    joint = captured(Skipping(), batch[0][:1])
    cut = cut_into_stages(joint, ["layers.1", "layers.2"])
    on = [line for line in repr(cut).splitlines() if line.endswith("sent on")]
    assert len(on) == 2 and "activation" in on[0] and "gradient" in on[1]
    module = joint.authored.module
    _, right = eager(module, batch, range(COUNT))
    runs = [StageRun(stage, module, True) for stage in cut.stages]
    for number in range(COUNT):
        values = []
        for run in runs:
            values = run.forward(number, [batch[0][number:number + 1]], values)
        values = [torch.ones(())]
        for run in reversed(runs):
            values = run.backward(number, values)
    for run in runs:  # all weights last
        for number in range(COUNT):
            run.backward_weights(number)
        run.finish(COUNT)
    assert [name for name, p in module.named_parameters() if not torch.equal(p.grad, right[name])] == []


def tied():
    module = Summed(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    module[2].weight = module[0].weight
    return module


class Masked(nn.Sequential):
    """The last layer's loss counts where the first layer's values are above zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self[0](x)
        return self[2](self[1](first)).where(first > 0, 0).sum()


@pytest.mark.parametrize(("module", "told"), [
    (Masked(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
     "torch's stages send a gradient back for each activation, and in front of stage 1 float32 [2, 4], float32 [2, 4] "
     "would go and float32 [2, 4] come back: start a stage elsewhere"),
    (tied(), "stages 0 and 1 read parameter '0.weight', and each would train a copy: untie it"),
    (Summed(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)),
     "the forward gives 4 values, and not a loss alone: return the loss, and write no buffers, as batch norm does"),
])
def test_a_module_that_no_pipeline_can_train_is_refused(module, told):
    with pytest.raises(WorkbenchError) as error:
        cut_into_stages(captured(module, torch.randn(2, 4)), ["2"])
    assert str(error.value) == f"cut_into_stages: {told}"


@pytest.mark.parametrize(("stages", "told"), [
    (["layers.9"], "no module 'layers.9' runs, or not in this order: the blocks are layers.0, layers.1, layers.2, "
                   "layers.3"),
    (["layers.3", "layers.2"], "no module 'layers.2' runs, or not in this order"),
    (5, "5 stages of 4 blocks: ask for fewer stages"),
])
def test_stages_that_are_not_there_are_refused(joint, stages, told):
    with pytest.raises(WorkbenchError) as error:
        cut_into_stages(joint, stages)
    assert str(error.value).startswith(f"cut_into_stages: {told}")


def test_fsdp_gathers_and_scatters_once_a_step_also_in_buckets():
    with fake_world(4) as world:  # two places in a pipeline, each of which is two FSDP ranks
        joint = capture(author(small(2, **{"mesh.dp_shard": 2}), replace(world, pipeline=2)))
        for passes in ([], ["transformer_block_bucketing"]):
            for stage in cut_into_stages(joint, ["layers.1"]).stages:
                records, _ = run_partitioned(stage.pair, passes)
                assert [str(v.outcome) for record in records for v in record.verdicts] == ["PASS"] * 3 * len(passes)
                run = StageRun(stage, joint.authored.module, True)
                gathers, scatters = (list_collectives(piece.graph) for piece in (run.gather, run.reduce))
                assert {c.kind for c in gathers} == {"all_gather"} and {c.kind for c in scatters} == {"reduce_scatter"}
                buckets = 2 if passes else len(run.gradients)
                assert len(gathers) == len(scatters) == buckets and len(run.gradients) in (10, 11)
                for piece in (run.forwards, run.regather, *run.backwards):
                    assert list_collectives(piece.graph) == []


def test_split_backward_moves_what_no_sent_gradient_needs_and_says_how_much(joint):
    cut = cut_into_stages(joint, ["layers.2"])
    for stage in cut.stages:
        (record,), _ = run_partitioned(stage.pair, ["split_backward"])
        effect = record.verdict("effect")
        if stage.number == 0:  # it sends nothing
            assert str(effect.outcome) == "NO_EFFECT"
            continue
        assert [str(verdict.outcome) for verdict in record.verdicts] == ["PASS"] * 3
        second = second_half(stage.pair.backward)
        assert effect.evidence["second"] == len(second) and effect.evidence["held_bytes"] > 0
        assert effect.evidence["moved_ms"] > 0 and effect.evidence["first"] > len(second)
        products = [n for n in second if "mm" in str(n.target)]
        assert len(products) == 7 * 2 + 1  # the weights' gradients of two blocks and of the output layer
        run = StageRun(stage, joint.authored.module, True)
        assert set(run.backwards[1].gives) <= {n.name for n in second}
        assert not any(is_backward(n) and n.name in run.sent for n in second)


def test_a_stage_holds_what_it_received_too():
    linear = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    cut = cut_into_stages(captured(Summed(*linear), torch.randn(2, 4)), ["2"])
    whole = estimate(cut, plan(["0F0 0B0", "1F0 1B0"], 2, 2, 1))
    assert whole.live == [2 * 32, 2 * 32]  # float32 [2, 4] in front of each of a stage's two layers


def test_the_weights_that_a_late_half_reads_are_held_once_and_not_for_each_microbatch():
    cut = cut_into_stages(capture(author(small(4, **{"precision.param": "bfloat16"}), ALONE)), 2)
    orders = ["0F0 0B0", "1F0 1B0"], ["0F0 0I0 0W0", "1F0 1I0 1W0"]
    whole, halves = (estimate(cut, plan(order, 2, 2, 1)).live[0] for order in orders)
    layers = [p for name, p in cut.of.authored.module.named_parameters() if name.startswith(("layers.0", "layers.1"))]
    assert 0 <= halves - whole < sum(2 * p.numel() for p in layers)
