"""What `adopt` refuses, in which sentence, with the model as it was; and what an adopted model knows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fsdp2_models import DIM, Tiny
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from workbench.authoring.adopt import UNIT, adopt, adopted
from workbench.authoring.plans import AuthoringError
from workbench.authoring.simple_fsdp import GATHERS
from workbench.world.fake import fake_world

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def world() -> Iterator[Any]:
    with fake_world(4) as world:
        yield world


def sharded(change: Callable[[Any], Any] = lambda model: None, **options: Any) -> Any:
    """A model on 4 ranks, changed before or, by a function that `change` returns, after `fully_shard`."""
    model = Tiny()
    after = change(model)
    mesh = init_device_mesh("cpu", (4,))
    for unit in (*model.layers, model):
        fully_shard(unit, **{"mesh": mesh} | options)
    if after is not None:
        after()
    return model


def refusal(model: Any) -> str:
    classes = [type(module) for module in model.modules()]
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    with pytest.raises(AuthoringError) as refused:
        adopt(model)
    assert [type(module) for module in model.modules()] == classes and adopted(model) is None
    assert [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()] == hooks
    text = str(refused.value)
    assert text.startswith("adopt: ") and text.endswith("; the model is as it was")
    return text.removeprefix("adopt: ").removesuffix("; the model is as it was")


class Scaled(torch.Tensor):
    """Stands for a float8 weight, whose shards are converted before they are gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError

    def fsdp_post_all_gather(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


def scaled(model: Any) -> Any:
    weight = dict(model.named_parameters())["norm.weight"]
    weight._local_tensor = weight._local_tensor.as_subclass(Scaled)


def compiled(model: Any) -> None:
    model.layers[0].compile()


def wrapped(model: Any) -> None:
    model.layers[0] = checkpoint_wrapper(model.layers[0])


def optimised(model: Any) -> None:
    model.layers[0] = torch.compile(model.layers[0])


ON_ITS_OWN = "is compiled on its own: leave that out, and call torch.compile on the model after adopt"
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "replicate": (lambda: replicate(Tiny(), mesh=init_device_mesh("cpu", (4,))),
                  "parameter embed.weight is under replicate, and adopt takes what is under fully_shard"),
    "plain": (Tiny, "no module of Tiny is under fully_shard: call that before"),
    "compile": (lambda: sharded(compiled), f"module layers.0 {ON_ITS_OWN}"),
    "compiled": (lambda: sharded(optimised), f"module layers.0 {ON_ITS_OWN}"),
    "checkpoint": (lambda: sharded(wrapped), "module layers.0 is a checkpoint wrapper: leave it out, and list the pass "
                                             "activation_checkpointing"),
    "offload": (lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
                "parameter embed.weight is offloaded to the CPU: leave out CPUOffloadPolicy"),
    "meta": (lambda: sharded(lambda model: model.to("meta") and None),
             "parameter embed.weight is on the meta device: give it values before, with to_empty and your "
             "initialisation"),
    "subclass": (lambda: sharded(lambda model: lambda: scaled(model)),
                 "parameter norm.weight is a Scaled, whose fsdp_pre_all_gather changes what is gathered: leave it out"),
    "unsynchronised": (lambda: sharded(lambda model: lambda: model.set_requires_gradient_sync(False)),
                       "gradients are not synchronised: call set_requires_gradient_sync(True) before"),
    "hook": (lambda: sharded(lambda model: lambda: model.set_all_reduce_hook(print)),
             "the model communicates in its own way: leave out set_all_reduce_hook and the like"),
    "divisor": (lambda: sharded(lambda model: lambda: model.set_gradient_divide_factor(3.0)),
                "parameter embed.weight has a gradient divided by 3: give set_gradient_divide_factor a power of two"),
}
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # not in 2.11
    MODELS["unused"] = (lambda: sharded(lambda model: lambda: model.set_reduce_scatter_unused_params(True)),
                        "unused parameters get zero gradients: leave out set_reduce_scatter_unused_params")


@pytest.mark.parametrize("name", MODELS)
def test_what_would_not_be_reproduced_is_refused_by_name(name):
    make, sentence = MODELS[name]
    assert refusal(make()) == sentence


def of_two_axes(**mesh: int) -> Any:
    return init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def test_units_on_different_meshes_and_meshes_of_other_axes_are_refused():
    experts = of_two_axes(ep=2, inner=2)
    model = Tiny()
    fully_shard(model.layers[0], mesh=experts["inner"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert refusal(model) == (
        "parameter layers.0.norm.weight is on DeviceMesh((inner=2), 'cpu', stride=(1,)): all need one mesh, of at most "
        "dp_replicate and dp_shard for fully_shard, and tp for parallelize_module")
    model, mesh = Tiny(), of_two_axes(dp=2, tp=2)
    for name, parameter in list(model.named_parameters()):
        spread = DTensor.from_local(parameter.detach(), mesh, (Replicate(), Replicate()))
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], nn.Parameter(spread))
    if hasattr(fsdp, "DataParallelMeshDims"):  # not in 2.11
        fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"))
        assert refusal(model) == (
            "parameter embed.weight is on a mesh of all axes: call fully_shard with the data-parallel ones, without "
            "dp_mesh_dims")


def test_twice_and_half_adopted_models_are_refused():
    model = adopt(sharded())
    twice = "is adopted already: adopt a model once, and as a whole"
    with pytest.raises(AuthoringError, match=f"adopt: the model {twice}; the model is as it was"):
        adopt(model)
    model = sharded()
    adopt(model.layers[0])
    assert refusal(model) == f"module layers.0 {twice}"


def test_a_gradient_that_waits_for_its_reduction_is_refused():
    model = sharded()
    model.set_requires_gradient_sync(False)
    model(torch.arange(8).reshape(1, 8)).sum().backward()
    model.set_requires_gradient_sync(True)
    assert refusal(model) == (
        "parameter embed.weight has a gradient that is not reduced yet: call adopt between two steps")


def gather(model: Any, path: str, name: str = "weight") -> Any:
    return vars(model.get_submodule(path))[GATHERS][name]


def test_gathered_units_are_resharded_and_the_classes_are_the_users():
    model = sharded()
    model.unshard()
    model.layers[0].unshard()
    assert model.layers[0].scale.shape == (DIM,) and not isinstance(model.layers[0].scale, DTensor)
    assert adopt(model) is model and isinstance(model, Tiny)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    shards = dict(model.named_parameters())
    assert all(isinstance(shard, DTensor) for shard in shards.values())
    assert shards["layers.0.scale"].to_local().shape == (DIM // 4,)


def test_mixed_precision_and_divisors_become_those_of_the_gathers():
    model = sharded(lambda model: lambda: model.layers[0].set_gradient_divide_factor(1.0))
    adopt(model)
    inner, outer = gather(model, "layers.0.down"), gather(model, "head")
    assert (inner.factor, outer.factor) == (1.0, None)
    assert (inner.precision.param, inner.precision.reduce) == (torch.float32, torch.float32)
    x = torch.ones(2)
    for casts, dtype in ((True, torch.float16), (False, torch.float32)):
        half = adopt(sharded(mp_policy=MixedPrecisionPolicy(torch.float16, cast_forward_inputs=casts)))
        assert vars(half)[UNIT].cast_inputs(half, (x,), {})[0][0].dtype == dtype
    assert gather(half, "head").precision.reduce == torch.float16 and gather(half, "head").factor == 1 / 4


def test_units_become_buckets_and_keep_when_they_reshard():
    model = Tiny(layers=3)
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.layers[0].attention, mesh=mesh, reshard_after_forward=False)
    fully_shard(model.layers[0], mesh=mesh)
    fully_shard(model.layers[1], mesh=mesh, reshard_after_forward=2)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    authored = adopted(adopt(model))
    assert authored is not None and authored.buckets == [
        ["embed", "layers.2"], ["layers.0.down", "layers.0.norm", "layers.0.up"], "layers.0.attention", "layers.1",
        ["norm", "head"]]
    units = {path: vars(model.get_submodule(path))[UNIT].reshard
             for path in ("", "layers.0", "layers.0.attention", "layers.1", "norm")}
    assert units == {"": False, "layers.0": True, "layers.0.attention": False, "layers.1": True, "norm": True}


def test_axes_of_one_rank_are_left_out():
    model = Tiny()
    fully_shard(model, mesh=of_two_axes(replicas=1, shards=4))
    authored = adopted(adopt(model))
    assert authored is not None and authored.axes == {"dp_shard": 4} and authored.mesh is not None
    assert authored.groups == {"dp_shard": str(authored.mesh.get_group("dp_shard").group_name)}


def test_a_cuda_graph_that_is_being_recorded_is_refused(monkeypatch):
    model = sharded()
    for name in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    assert refusal(model) == "a CUDA graph is being recorded: call it before"
