"""The loss: in float32, and over a vocabulary that is cut over ranks as over the whole one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.authoring.models.loss import vocabulary_parallel
from workbench.authoring.plans import LLAMA3_PLAN, llama3_plan
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration
SMALL = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=17, ffn_dim=48, max_seq_len=16)


def data(scale):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 20, dtype=torch.float64, generator=generator) * scale
    targets = torch.randint(20, (12,), generator=generator)
    targets[:4] = torch.tensor([0, 4, 5, 19])  # the ends of ranks' parts
    return logits, targets


def parted(scale):
    """Loss and this rank's gradient."""
    world = current_world()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    logits, targets = data(scale)
    mine = logits.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    loss = vocabulary_parallel(mine, targets, mesh)
    loss.backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["small", "large logits"])
def test_loss_and_gradient_are_those_of_the_whole(pool4, scale):
    logits, targets = data(scale)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets)
    expected.backward()
    found = pool4.run(parted, scale)
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), logits.grad, rtol=1e-10, atol=1e-14)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)


def test_a_vocabulary_that_tp_does_not_divide_is_gathered():
    assert llama3_plan({"vocab_size": 256}, 4) == LLAMA3_PLAN and LLAMA3_PLAN.tensor["loss"] == "vocabulary"
    plan = llama3_plan({"vocab_size": 255}, 2)
    assert "loss" not in plan.tensor and plan.tensor["output"]["output"] == "replicate"


def test_the_loss_is_the_mean_cross_entropy_in_float32():
    torch.manual_seed(0)
    model, inputs, targets = Llama3(SMALL).bfloat16(), *torch.randint(17, (2, 2, 8))
    seen: list[torch.Tensor] = []
    model.output.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits))
    loss = model(inputs, targets)
    picked = seen[0].float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -picked.mean())
    assert model.double()(inputs, targets).dtype == torch.float64
