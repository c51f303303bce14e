"""Partition: a forward and a backward with their bodies open, and what is saved between them."""

from __future__ import annotations

import pytest
import torch
from on_ranks import FSDP_TP, small

from workbench.authoring.author import author, author_module
from workbench.errors import WorkbenchError
from workbench.graph.capture import capture
from workbench.graph.lower import compile_step
from workbench.graph.partition import partition, saved_nodes
from workbench.graph.read.nodes import output_values
from workbench.pipeline.run_passes import run_joint, saved_bytes
from workbench.world.fake import fake_world
from workbench.world.mesh import World

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def joint():
    with fake_world(4) as world:
        yield capture(author(small(FSDP_TP), world))


@pytest.fixture(scope="module")
def pair(joint):
    return partition(joint.fork())


def test_what_is_saved_is_what_the_backward_takes(pair):
    saved = saved_nodes(*pair.graphs)
    taken = [n for n in pair.backward.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
    assert len(saved) == len(taken) > 10
    for a, b in zip(saved, taken, strict=True):
        x, y = a.meta["val"], b.meta["val"]
        assert not isinstance(x, torch.Tensor) or (x.shape, x.dtype) == (y.shape, y.dtype)
    assert len(output_values(pair.forward)) == 1 + len(saved)
    assert pair.facts.results == 1
    with pytest.raises(RuntimeError, match=r"call compile_step\(\) first"):
        pair.slots[0]([])


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return (x - y).square().mean()


@pytest.mark.parametrize(("passes", "by"), [
    (("inductor_decomposition", "activation_checkpointing"), "min_cut"), ((), "default")], ids=str)
def test_any_module_without_a_recipe_and_without_ranks(passes, by):
    torch.manual_seed(0)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    reference = Mlp()
    module = Mlp()
    module.load_state_dict(reference.state_dict())
    world = World("gloo", 1, 0, torch.device("cpu"))
    joint = capture(author_module(module, world, None, batch=lambda: batch))
    run_joint(joint, passes)
    step = compile_step(partition(joint, by))
    assert repr(joint).startswith("JointGraph(Mlp: ") and repr(step) == "CompiledStep(Mlp: method, method)"
    loss, expected = step(*batch), reference(*batch)
    loss.backward()
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(step.module.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    with torch.no_grad():  # the module's own parameters are read at each call
        step.module.layers[2].bias.add_(1)
    assert not torch.allclose(step(*batch), expected)
    assert saved_bytes(step.pair) > 0


def test_by_default_everything_is_saved_that_the_backward_reads(joint, pair):
    saved_all = partition(joint.fork(), "default")
    assert saved_bytes(pair) < saved_bytes(saved_all)
    ours, theirs = ({n.name for n in p.forward.graph.nodes} & {n.name for n in p.backward.graph.nodes
                    if n.op == "call_function"} for p in (pair, saved_all))
    assert any(name.startswith("silu") for name in ours) and not any(name.startswith("silu") for name in theirs)
    with pytest.raises(WorkbenchError) as caught:
        partition(joint, by="min-cut")
    assert str(caught.value) == "partition(..., by='min-cut'): by must be one of min_cut, default"
    assert not joint.closed
