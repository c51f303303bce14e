"""Capture and partition: one graph, with where each node came from, then two; nothing of torch's left open."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import FSDP_TP, small
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves
from unknown_draws import Noisy, drew_again

from workbench import WorkbenchError, World, capture, compile_step, fake_world
from workbench.authoring.author import author, author_module
from workbench.graph.partition import partition
from workbench.graph.read.nodes import module_path, provenance
from workbench.pipeline.run_passes import run_joint, saved_bytes
from workbench.torch_api import aot

pytestmark = pytest.mark.integration


def values_of(graph: Any) -> list[Any]:
    """Of each tensor: what it is, and the first node that has its storage."""
    first: dict[int, str] = {}
    found: list[Any] = []
    for node in graph.nodes:
        for x in tree_leaves(node.meta.get("val")):
            if isinstance(x, torch.Tensor):
                owner = first.setdefault(x.untyped_storage()._cdata, node.name)
                found.append((node.name, x.dtype, x.stride(), x.storage_offset(), x.device, x.requires_grad, owner))
    return found


@pytest.fixture(scope="module")
def authored():
    with fake_world(4) as world:
        yield author(small(FSDP_TP), world)


@pytest.fixture(scope="module")
def joint(authored):
    return capture(authored)


def state():
    """What a capture could leave behind in the process."""
    from torch._dynamo import config
    from torch._functorch import config as functorch
    from torch._functorch import partitioners
    from torch._guards import TracingContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return {
        "mode": _get_current_dispatch_mode(), "tracing": TracingContext.try_get(),
        "fake tensor cache": config.fake_tensor_cache_enabled, "dynamo": config.get_config_copy(),
        "functorch": functorch.get_config_copy(), "partitioner": partitioners.has_recomputable_rng_ops,
        "threads": torch._C._is_multithreading_enabled(),
        "grad": torch.is_grad_enabled(), "meta": torch.fx.traceback.has_preserved_node_meta(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "random": random.getstate(),
        "generator": torch.random.get_rng_state().tolist(), "autocast": torch.is_autocast_enabled("cpu"),
        "hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),  # type: ignore[attr-defined]
    }


class Breaks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        if (x * self.w).sum() > 0:
            return x.sum()
        return (x * self.w).sum()


def test_a_refused_capture_leaves_the_process_as_it_was(authored):
    """Builds that go through: tests/pipeline/test_build.py."""
    with authored.world.fake_mode:
        x = torch.empty(3)
    broken = author_module(Breaks(), authored.world, None, batch=lambda: (x,))
    before = state()
    with pytest.raises(WorkbenchError) as refused:
        capture(broken)
    assert re.fullmatch(r"model Breaks: it cannot be captured at test_capture.py:\d+: \w+: .*branching.*: change that "
                        "line, or do it outside of the captured module", str(refused.value))
    assert state() == before
    assert type(torch.ones(2)) is torch.Tensor  # and not a fake one


def test_a_joint_graph_is_used_once(joint):
    joint = joint.fork()
    partition(joint)
    assert len(joint.graph.graph.nodes) > 100  # it can still be read
    for use in (partition, lambda j: run_joint(j, ["reshard_after_forward"])):
        with pytest.raises(WorkbenchError) as caught:
            use(joint)
        assert str(caught.value) == "the joint graph of small is closed, or partitioned already: capture again"


@pytest.mark.compat
def test_each_node_says_where_it_came_from(joint):
    nodes = [n for n in joint.graph.graph.nodes if n.op == "call_function"]
    assert [n.name for n in nodes if not provenance(n).file.endswith(".py")] == []
    for tag in ("is_forward", "is_backward"):
        part = [n for n in nodes if n.meta.get("partitioner_tag") == tag]
        rest = [n for n in part if not module_path(n)]
        assert len(rest) < 0.05 * len(part)
        # the rest is the root module's own: the table of rotations
        assert all(Path(provenance(n).file).name in ("decoder.py", "llama3.py", "layers.py") for n in rest)
        assert all("rope" in provenance(n).text or "cos, sin" in provenance(n).text for n in rest)


@pytest.mark.nightly  # a capture more
def test_the_fake_tensor_cache_changes_no_node(authored, joint, monkeypatch):
    """Names, arguments, values and the memory under them, traced with the cache and without."""
    def uncached(*args, **keywords):
        TracingContext.get().fake_mode.cache_enabled = False
        return aot_export_joint_with_descriptors(*args, **keywords)

    monkeypatch.setattr(aot, "aot_export_joint_with_descriptors", uncached)
    plain = capture(authored)
    assert len(joint.graph.graph.nodes) > 500 and str(joint) == str(plain)
    assert values_of(joint.graph.graph) == values_of(plain.graph.graph)


# partition: a forward and a backward with their bodies open, and what is saved between them


@pytest.fixture(scope="module")
def pair(joint):
    return partition(joint.fork())


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


def test_a_model_s_own_checkpoint_does_not_draw_again_in_an_operator_without_a_tag():
    module, batch = Noisy(checkpoints=True), (torch.rand(16, 8),)
    joint = capture(author_module(module, World("gloo", 1, 0, torch.device("cpu")), None, batch=lambda: batch))
    assert not drew_again(module, compile_step(partition(joint))(*batch))


def test_by_default_everything_is_saved_that_the_backward_reads(joint, pair):
    with pytest.raises(RuntimeError, match=r"call compile_step\(\) first"):
        pair.slots[0]([])
    saved_all = partition(joint.fork(), "default")
    assert saved_bytes(pair) < saved_bytes(saved_all)
    ours, theirs = ({n.name for n in p.forward.graph.nodes} & {n.name for n in p.backward.graph.nodes
                    if n.op == "call_function"} for p in (pair, saved_all))
    assert any(name.startswith("silu") for name in ours) and not any(name.startswith("silu") for name in theirs)
    with pytest.raises(WorkbenchError) as caught:
        partition(joint, by="min-cut")
    assert str(caught.value) == "partition(..., by='min-cut'): by must be one of min_cut, default"
    assert not joint.closed


class Remembers(torch.nn.Linear):
    """Keeps a buffer and a cache of its validation."""

    def __init__(self, keep: str) -> None:
        super().__init__(8, 8)
        self.keep = keep
        self.register_buffer("mean", torch.ones(8))
        self.cache = torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.training:
            setattr(self, self.keep, y.mean(0))
        return (y * self.mean.exp() * self.cache).mean()


@pytest.mark.parametrize("keep", ["mean", "cache"])
def test_tensors_made_under_inference_mode_are_refused_by_name(keep):
    batch = (torch.ones(4, 8),)
    module = Remembers(keep)
    authored = author_module(module, World("gloo", 1, 0, torch.device("cpu")), None, batch=lambda: batch)

    def validate_and_train(mode: Any) -> None:
        with mode:
            module.eval()(*batch)
        module.train()
        compile_step(partition(capture(authored)))(*batch).backward()

    validate_and_train(torch.no_grad())
    with pytest.raises(WorkbenchError) as error:
        validate_and_train(torch.inference_mode())
    assert str(error.value) == (f"model Remembers: {keep} was made under torch.inference_mode(), and no step can save "
                                "it: validate under torch.no_grad() instead")
