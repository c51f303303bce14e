"""float8_matmul: each reason of a product's own why it stays, and whether the ranks emulate what is converted."""

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm

from workbench import ParallelPlan, Precision, WorkbenchError, World, author_module, capture, fake_world, run_joint
from workbench.graph.make_nodes import fake_mode_of
from workbench.lab.float8 import Float8Options, transform
from workbench.lab.float8.linear import products_of

ALONE = World("gloo", 1, 0, torch.device("cpu"))
EMULATED = "on these CPUs products are emulated in float32, and so nothing is said of time"


class Layer(nn.Module):
    """A linear layer by hand, and then `block` of its result and of a second weight."""

    def __init__(self, block, dtype):
        super().__init__()
        self.block = block
        self.first, self.second = (nn.Parameter(torch.empty(32, 32, dtype=dtype)) for _ in range(2))

    def forward(self, x):
        return self.block(x @ self.first.t(), self.second)


class Model(nn.Module):
    def __init__(self, block, dtype):
        super().__init__()
        self.layers = nn.ModuleList([Layer(block, dtype)])

    def forward(self, x):
        return self.layers[0](x).square().sum()


def captured(block, dtype=torch.float32, world=ALONE):
    precision = Precision(dtype)
    return capture(author_module(Model(block, precision.stored), world, None, ParallelPlan(units=("layers.*",)),
                                 precision=precision, batch=lambda: (torch.empty(32, 32, dtype=dtype),)))


def linear(y, weight):
    return torch.relu(y) @ weight.t()


def of_a_slice(y, weight):
    return torch.relu(y)[:, :16] @ weight[:, :16].t()


def of_24_columns(y, weight):
    return torch.relu(y)[:, :24].contiguous() @ weight[:, :24].contiguous().t()


def of_its_own_result(y, weight):
    """Scores of tokens: no operand comes from a parameter."""
    return (y @ y.t()) * weight


def grouped(y, weight):
    """As two experts of 16 rows each."""
    both = torch.stack((weight, weight)).transpose(1, 2)
    return grouped_mm(torch.relu(y), both, offs=torch.arange(16, 48, 16, dtype=torch.int32))


def effect_of(joint, **options):
    listed = {"name": "float8_matmul", "smallest": 16, **options}
    return run_joint(joint, [listed])[0].verdict("effect")


@pytest.mark.parametrize(("block", "dtype", "why", "where"), [
    (of_a_slice, torch.float32, "an operand has strides (32, 1)", "layers.0 forward"),
    (of_24_columns, torch.float32, "size 24 is no multiple of 16", "layers.0 forward"),
    (of_its_own_result, torch.float32, "belongs to no linear layer", "layers.0 mm_1"),
    (grouped, torch.bfloat16, "grouped product, aten._grouped_mm: only a product of two matrices is converted",
     "layers.0 "),
])
def test_each_product_that_stays_has_its_reason(block, dtype, why, where):
    left = effect_of(captured(block, dtype)).evidence["left"]
    assert set(left) == {why} and any(name.startswith(where) for name in left[why])


@pytest.mark.parametrize(("dtype", "smallest", "why"), [
    (torch.float64, 16, "an operand is float64"), (torch.float32, 128, "size 32 is below smallest, 128")])
def test_a_pass_that_converts_nothing_is_refused_with_the_reason(dtype, smallest, why):
    told = f"no product is left to convert .*5: {why}, layers.0 forward first"
    with pytest.raises(WorkbenchError, match=told):
        effect_of(captured(linear, dtype), smallest=smallest)


def on_a_gpu(joint):
    """The graph with its products' results on a GPU."""
    with fake_mode_of(joint.graph):
        for product in products_of(joint.graph):
            value = product.node.meta["val"]
            product.node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return joint.graph


def test_rowwise_scales_need_a_bfloat16_result_on_a_gpu_alone():
    options = Float8Options(smallest=16, scaling="rowwise")
    stays = transform.chosen(on_a_gpu(captured(linear)), options)[1]
    assert {why: len(names) for why, names in stays.items()} == {"rowwise scales need a bfloat16 result on a GPU": 5}
    for graph in (on_a_gpu(captured(linear, torch.bfloat16)), captured(linear).graph):
        assert not transform.chosen(graph, options)[1]


def test_the_effect_says_that_a_cpu_emulates_and_a_gpu_and_a_fake_world_do_not():
    effect = effect_of(captured(linear))
    assert effect.outcome == "PASS" and effect.evidence["emulated"]
    assert effect.message == f"5 of 5 products are float8; {EMULATED}"
    graph = on_a_gpu(captured(linear))
    told = transform.products_converted((graph,), (graph,), Float8Options(smallest=16))
    assert told.evidence["eligible"] == 5 and not told.evidence["emulated"] and EMULATED not in told.reason
    with fake_world(1) as world:
        fake = effect_of(captured(linear, world=world))
    assert not fake.evidence["emulated"] and fake.message == "5 of 5 products are float8"
