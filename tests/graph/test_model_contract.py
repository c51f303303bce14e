"""What a user's model must be: each breach is one sentence with the model, the parameter or module, and the remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from workbench import ParallelPlan, WorkbenchError, author, author_module, capture, register_model
from workbench.authoring.simple_fsdp import Precision
from workbench.graph.partition import partition
from workbench.recipe.recipe import Recipe, load_recipe

pytestmark = pytest.mark.integration
SHAPE = (2, 16)


def vectors() -> tuple[torch.Tensor]:
    return (torch.empty(4, 8),)


class Net(nn.Module):
    """An embedding and a layer; what it returns is the test's."""

    def __init__(self, give: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.give = give
        self.body = nn.ModuleDict({"embed": nn.Embedding(256, 8), "head": nn.Linear(8, 8)})

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        return self.give(self.body, self.body["embed"](tokens))


class Nothing(nn.Module):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return tokens.float().mean()


def mean(body: Any, x: torch.Tensor) -> torch.Tensor:
    return body["head"](x).float().pow(2).mean()


ANY = (
    (Nothing, "it has no parameters, and so nothing to train: give it an nn.Parameter"),
    (lambda: Net(mean).requires_grad_(False),
     "all of its parameters are frozen, body.embed.weight first: call requires_grad_() on those that are to be "
     "trained"),
    (lambda: Net(lambda body, x: 1.0), "its forward returns no tensor: return the mean loss, a scalar tensor"),
    (lambda: Net(lambda body, x: body["head"](x.detach()).detach().mean()),
     "what its forward returns depends on no parameter that requires a gradient: look for detach, no_grad, argmax, or "
     "a cast to integers on its way"),
)
OF_RECIPES = (
    (lambda body, x: (mean(body, x), x), "a tuple: float32 [], float32 [2, 16, 8]"),
    (lambda body, x: body["head"](x), "a tensor: float32 [2, 16, 8], made in module body.head"),
    (lambda body, x: mean(body, x).to(torch.complex64), "a tensor: complex64 []"),
)


def authored(module: nn.Module, world: Any, precision: Precision | None = None) -> Any:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        with world.fake_mode:
            return torch.zeros(SHAPE, dtype=torch.int64), torch.zeros(SHAPE, dtype=torch.int64)

    return author_module(module, world, world.mesh_of({"dp_shard": 4}), ParallelPlan(), batch=batch,
                         precision=precision)


def of_recipe(make: Callable[[], nn.Module], **changes: Any) -> Recipe:
    register_model("own", sizes={"vocab_size": 256, "max_seq_len": 64})(lambda sizes: make())
    return load_recipe("llama3").override({"name": "mine", "model.family": "own", "data.seq_len": SHAPE[1],
                                           "data.batch_per_rank": SHAPE[0], "mesh.dp_shard": 4, "mesh.tp": 1,
                                           **changes})


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(WorkbenchError) as error:
        act()
    return str(error.value)


def test_a_module_that_no_step_can_train_is_refused(fake4: Any) -> None:
    for make, says in ANY:
        module = make()
        assert refused(lambda module=module: capture(authored(module, fake4))) == (
            f"model {type(module).__name__}: {says}")


def test_a_recipes_model_returns_one_scalar_loss(fake4: Any) -> None:
    for give, says in OF_RECIPES:
        recipe = of_recipe(lambda give=give: Net(give))
        assert refused(lambda recipe=recipe: capture(author(recipe, fake4))) == (
            f"model Net of recipe 'mine': its forward returns {says}: return the mean loss alone, a real "
            "floating-point scalar")


def test_a_module_without_a_recipe_may_return_what_its_caller_differentiates(fake4: Any) -> None:
    module = Net(lambda body, x: (mean(body, x), x))
    module.body["embed"].requires_grad_(False)  # some are frozen, and not all
    assert partition(capture(authored(module, fake4))).backward.graph.nodes


def test_a_dtensor_on_a_mesh_that_no_parameter_has_is_refused(fake4: Any) -> None:
    def returning(*meshes: Any) -> Any:
        def give(body: Any, x: torch.Tensor) -> DTensor:
            return DTensor.from_local(body["head"](x), mesh, [Replicate()] * mesh.ndim)

        model = authored(Net(give), fake4)
        mesh, *_ = *meshes, next(model.module.parameters()).device_mesh
        return capture(model)

    assert partition(returning()).backward.graph.nodes
    assert refused(lambda: returning(fake4.mesh_of({"dp_replicate": 2, "dp_shard": 2}))) == (
        "model Net: its forward returns a DTensor on a mesh that no parameter has: return its to_local() or its "
        "full_tensor()")


def test_a_model_of_half_precision_does_not_become_another_in_silence(fake4: Any) -> None:
    assert refused(lambda: authored(Net(mean).half(), fake4)) == (
        "model Net: parameter body.embed.weight is torch.float16, and the step would compute in torch.float32: call "
        ".float() on the model, and give the dtype to compute in as precision.param")
    computes = authored(Net(mean).half(), fake4, Precision(torch.float16))
    assert {n.meta["val"].dtype for n in capture(computes).graph.graph.nodes if "embedding" in n.name and
            "backward" not in n.name} == {torch.float16}
    assert "body.embed.weight is torch.bfloat16, and the step would compute in torch.float32" in refused(
        lambda: author(of_recipe(lambda: Net(mean).bfloat16()), fake4))
    assert author(of_recipe(lambda: Net(mean).bfloat16(), **{"precision.param": "bfloat16"}), fake4)


class OwnWords(nn.Module):
    """Writes its own parameter, under another word for self."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.scale.mul_(0.5)
        return (module.parts[0](x) * module.scale).mean()


def test_a_write_of_a_gathered_parameter_is_refused_whatever_self_is_called(fake4: Any) -> None:
    sharded = author_module(OwnWords(), fake4, fake4.mesh_of({"dp_shard": 4}), batch=vectors)
    assert refused(lambda: capture(sharded)) == (
        "model OwnWords: parameter scale is written in the forward, where it is a gathered copy, and its shards would "
        "keep their values: write between the steps, under torch.no_grad()")
    assert capture(author_module(OwnWords(), fake4, None, batch=vectors))  # no copy: torch writes it


class Halves(torch.autograd.Function):
    """Its second half is used by nobody, so that its gradient is None in eager."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> torch.Tensor:  # type: ignore[override]
        assert isinstance(first, torch.Tensor)
        return first * (1.0 if second is None else 5.0)


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Halves.apply(super().forward(x))[0].mean()  # type: ignore[no-untyped-call]


def test_a_function_that_asks_for_gradients_of_none_is_refused_at_its_line(fake4: Any) -> None:
    authored = author_module(Halved(8, 8), fake4, None, batch=vectors)
    line = Halves.forward.__code__.co_firstlineno + 2
    assert refused(lambda: capture(authored)) == (
        f"model Halved: it cannot be captured at test_model_contract.py:{line}: Unsupported: under "
        "ctx.set_materialize_grads(False) its backward would get zeros where eager gives it None: change that line, "
        'or do it outside of the captured module, or try capture "traced"')
    assert capture(authored, by="traced")


class Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 3:
            raise ValueError("my own words: give a width of three")
        return super().forward(x).mean()


class Asserts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 9, "need nine"
        return super().forward(x).mean()


@pytest.mark.parametrize(("kind", "by", "says", "offset"), [
    (Raises, "joint", "ValueError at {}: my own words: give a width of three", 2),
    (Raises, "traced", "ValueError at {}: my own words: give a width of three", 2),
    (Asserts, "joint", "AssertionError at {}: need nine", 1),
])
def test_what_the_forward_itself_raises_is_shown_as_its_own(
        fake4: Any, kind: Any, by: str, says: str, offset: int) -> None:
    line = kind.forward.__code__.co_firstlineno + offset
    authored = author_module(kind(8, 8), fake4, fake4.mesh_of({"dp_shard": 4}), batch=vectors)
    assert refused(lambda: capture(authored, by=by)) == (
        f"model {kind.__name__}: its forward raised {says.format(f'test_model_contract.py:{line}')}")


class Maps(nn.Linear):
    """Its weight is gathered inside the transform, which no capture can do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row @ self.weight)(x).mean()


class Chooses(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda rows: rows @ self.weight, lambda rows: 2 * rows, (x,)).mean()


class Differentiates(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda rows: (rows @ self.weight).square().mean())(x).mean()


SETUP = "it must override the setup_context staticmethod"


@pytest.mark.parametrize(("kind", "reason"), [
    (Maps, SETUP), (Differentiates, SETUP), (Chooses, "torch's cond takes no sharded tensor")])
def test_a_capture_does_not_name_another_that_refuses_too(fake4: Any, kind: Any, reason: str) -> None:
    code = kind.forward.__code__
    line = max(number for *_, number in code.co_lines() if number)
    authored = author_module(kind(8, 8), fake4, fake4.mesh_of({"dp_shard": 4}), batch=vectors)
    said = refused(lambda: capture(authored))
    assert f"cannot be captured at test_model_contract.py:{line}: " in said
    assert said.endswith(f"{reason}: change that line, or do it outside of the captured module")
