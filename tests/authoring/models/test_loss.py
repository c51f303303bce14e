"""The loss: in float32, and over a vocabulary that is cut over ranks as over the whole one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from workbench.authoring.models.llama3 import Llama3, Llama3Config
from workbench.authoring.models.loss import vocabulary_parallel
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration


def data():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 20, dtype=torch.float64, generator=generator) * 300
    targets = torch.randint(20, (12,), generator=generator)
    targets[:4] = torch.tensor([0, 9, 10, 19])  # the ends of ranks' parts
    return logits, targets


def parted():
    """Loss and this rank's gradient."""
    world = current_world()
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    logits, targets = data()
    mine = logits.chunk(world.size, 1)[world.rank].clone().requires_grad_()
    loss = vocabulary_parallel(mine, targets, mesh)
    loss.backward()
    return loss.detach(), mine.grad


def test_loss_and_gradient_of_large_logits_are_those_of_the_whole(pool2):
    logits, targets = data()
    logits.requires_grad_()
    expected = F.cross_entropy(logits, targets)
    expected.backward()
    found = pool2.run(parted)
    gradient = torch.cat([grad for _, grad in found], 1)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-10, atol=1e-14)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)


def test_the_loss_is_the_mean_cross_entropy_in_float32():
    torch.manual_seed(0)
    config = Llama3Config(
        dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=17, ffn_dim=48, max_seq_len=8
    )
    model, inputs, targets = Llama3(config).bfloat16(), *torch.randint(17, (2, 2, 8))
    seen: list[torch.Tensor] = []
    model.output.register_forward_hook(lambda _module, _inputs, logits: seen.append(logits))
    loss = model(inputs, targets)
    picked = seen[0].float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, -picked.mean())
    assert model.double()(inputs, targets).dtype == torch.float64
