"""What no definition in test_deepseek_v3.py says of experts: dropped copies, and the kernel of a GPU."""

import pytest
import torch

from workbench.authoring.models.moe import copies_of, send_by_capacity
from workbench.torch_api.distributed.experts import grouped_matmul


def test_capacity_drops_the_last_and_says_so():
    copies = torch.arange(1.0, 6.0).unsqueeze(1)
    experts = torch.tensor([1, 0, 1, 1, 0])
    rows, _, back, dropped = send_by_capacity(copies, experts, copies_of(experts, 2), None, 2)
    assert rows.squeeze(2).tolist() == [[2.0, 5.0], [1.0, 3.0]] and dropped.item() == 1
    assert back(rows).flatten().tolist() == [1.0, 2.0, 3.0, 0.0, 5.0]


@pytest.mark.gpu
def test_one_kernel_gives_what_a_product_for_each_group_gives():
    torch.manual_seed(0)
    rows, weights = torch.randn(64, 32), torch.randn(4, 32, 48) / 6
    counts = [17, 0, 40, 7]
    cuda = [t.cuda().bfloat16().requires_grad_() for t in (rows, weights)]
    sizes = torch.tensor(counts, device="cuda")
    plain = [t.detach().float().cpu().requires_grad_() for t in cuda]
    for given in (cuda, plain):
        grouped_matmul(given[0], given[1], sizes.to(given[0].device), counts).square().sum().backward()
    for ours, expected in zip(cuda, plain, strict=True):
        assert (ours.grad.float().cpu() - expected.grad).norm() < 1e-2 * expected.grad.norm()
