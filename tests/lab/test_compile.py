"""`workbench.compile` on one rank: the values of eager, what runs eagerly instead, and what a sentence refuses."""

import copy
import dataclasses
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import Block
from on_ranks import calls, user_pass
from torch import nn
from torch.distributed.fsdp import fully_shard

import workbench
from workbench import Outcome, WorkbenchError
from workbench.torch_api.tree import tree_leaves


@dataclasses.dataclass
class Result:
    loss: torch.Tensor | None
    logits: torch.Tensor
    name: str = "result"


class Net(nn.Module):
    """(rows, 8) -> what `returns` says of the mean squared error to `y` and of the last block's output."""

    def __init__(self, returns: str = "loss") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.returns = returns

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, scale: float = 1.0) -> Any:
        for block in self.blocks:
            x = block(x) * scale
        loss = None if y is None else ((x - y) ** 2).mean()
        if self.returns == "number":
            return 3
        return {
            "loss": loss, "logits": x, "tuple": (loss, [x], None), "dict": {"loss": loss, "logits": x},
            "dataclass": Result(loss, x),
        }[self.returns]


class Cache:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Cached(Net):
    """Returns an object beside its loss, as models of transformers do, unless it is told not to."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, use_cache: bool | None = None) -> Any:
        return super().forward(x, y) if use_cache is False else (super().forward(x, y), Cache(x))


class Branches(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return super().forward(x if x.sum() > 0 else -x, y)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8)


def gradients(module: nn.Module, result: Any) -> list[torch.Tensor]:
    """Of a sum over all that the module returned; the module has none afterwards."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    torch.stack([place * tensor.sum() for place, tensor in enumerate(tensors, 1)]).sum().backward()
    values = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    return values


def compiled(model: nn.Module, example: Any, **more: Any) -> Any:
    return workbench.compile(model, example=example, **{"level": "light", "progress": False} | more)


PASSES: dict[str, Any] = {
    "joint_passes": [{"name": "activation_checkpointing", "policy": "full"}], "passes": ["graph_cleanup"]}


@pytest.mark.compat
@pytest.mark.parametrize("returns", ["loss", "tuple", "dataclass"])
def test_a_step_returns_what_forward_returned_with_the_gradients_of_eager(returns):
    model, inputs = Net(returns), batch()
    eager = copy.deepcopy(model)
    step = compiled(model, inputs, level="full", **PASSES)
    ours, theirs = step(*inputs), eager(*inputs)
    assert type(ours) is type(theirs)
    if returns == "dataclass":
        assert ours.name == theirs.name
    assert all(map(torch.equal, *[filter(torch.is_tensor, tree_leaves(each)) for each in (ours, theirs)]))
    assert all(map(torch.equal, gradients(model, ours), gradients(eager, theirs)))
    report = step.report
    assert report.ok and report.level == "full" and {record.outcome for record in step.records} == {Outcome.PASS}
    assert [verdict.outcome for verdict in report.pipeline if verdict.check == "numerics"] == [Outcome.PASS]
    assert step.records[0].verdict("effect").evidence["layers"] == 2  # the model's `blocks`


def test_a_wrong_pass_fails_on_outputs_that_are_no_loss():
    def forgets_to_double(gm):
        for node in calls(gm, "aten.mul"):
            node.replace_all_uses_with(node.args[0])
        return gm

    with user_pass("forgets_to_double", forgets_to_double) as mine:
        model = Net("logits")
        with pytest.warns(UserWarning, match=r"compile of Net: a verdict is FAIL: print\(step.report\)"):
            step = compiled(model, {"x": batch()[0], "scale": 2.0}, level="full", joint_passes=[mine])
        told = step.report
    assert not told.ok and told.pass_row(mine).verdict("numerics").outcome is Outcome.FAIL


def test_keywords_are_called_as_keywords_and_a_cache_is_not_asked_for():
    inputs = dict(zip("xy", batch(), strict=True))
    model = Cached("dict")
    eager = copy.deepcopy(model)
    step = compiled(model, inputs)
    ours, theirs = step(**inputs), eager(**inputs, use_cache=False)
    assert list(ours) == list(theirs) and all(map(torch.equal, gradients(model, ours), gradients(eager, theirs)))
    other = {name: value[:3] for name, value in inputs.items()}
    with pytest.warns(UserWarning, match="the shape of x is"):
        assert torch.equal(step(**other)["loss"], eager(**other, use_cache=False)["loss"])
    same = compiled(model, {"x": inputs["x"], "y": inputs["x"]}, level="full")  # one tensor for both
    assert same.report.ok and torch.equal(same(**inputs)["loss"], theirs["loss"])
    positional = compiled(model, tuple(inputs.values()))
    assert torch.equal(positional(inputs["x"], y=inputs["y"])["loss"], theirs["loss"])


CHANGES = {
    "the shape of x is [3, 8] now, and was [4, 8] at the capture": lambda model, rows: rows.append(3),
    "training of blocks.1.up is False now, and was True at the capture": lambda model, rows: model.blocks[1].up.eval(),
    "requires_grad of blocks.0.up.weight is False now, and was True at the capture":
        lambda model, rows: model.blocks[0].up.weight.requires_grad_(False),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_the_capture_does_not_hold_for_runs_the_model_and_is_told_once(reason):
    model, rows = Net(), list[int]()
    step = compiled(model, batch())
    CHANGES[reason](model, rows)
    inputs = batch(*rows)
    expected = f"workbench.compile of Net: {reason}: the model itself runs"
    with pytest.warns(UserWarning, match=f"^{re.escape(expected)}$"):
        loss = step(*inputs)
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(loss, step(*inputs))


def test_without_gradients_and_under_autocast_the_model_runs():
    model, inputs = Net(), batch()
    step = compiled(model, inputs)
    with torch.no_grad(), pytest.warns(UserWarning, match="gradients are off"):
        assert not step(*inputs).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="autocast of the model is torch.bfloat16 now, and was False"):
            step(*inputs)
        inside, expected = compiled(model, inputs, level="full"), model(*inputs)
        assert torch.equal(inside(*inputs), expected) and inside.report.ok


class AsTheProcess(Net):
    """Its loss tells under which setting it ran: attention on a GPU takes a slower kernel under deterministic=True."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        return loss + 100.0 if torch.are_deterministic_algorithms_enabled() else loss


@pytest.mark.parametrize("setting", [False, True])
def test_a_step_is_captured_under_the_users_own_setting_of_determinism(setting):
    model, inputs = AsTheProcess(), batch()
    torch.use_deterministic_algorithms(setting)
    try:
        step = compiled(model, inputs, level="full")
        assert torch.equal(step(*inputs), model(*inputs)) and (step(*inputs) > 50).item() is setting
        assert step.report.ok
    finally:
        torch.use_deterministic_algorithms(False)


def test_slices_with_gaps_and_tensors_without_are_one_kind_of_batch():
    model, rows = Net(), torch.randn(4, 9)
    for example in (rows[:, 1:], torch.randn(4, 8)):
        step = compiled(model, (example, example))
        for x in (rows[:, :-1], rows[:, 1:].contiguous(), rows[:, 1:].t().contiguous().t()):
            torch.testing.assert_close(step(x, x), model(x, x))


def test_a_batch_of_another_kind_is_an_error():
    step, (x, y) = compiled(Net(), batch()), batch()
    with pytest.raises(WorkbenchError, match="the dtype of x: float32 at the capture, and float64 now"):
        step(x.double(), y)
    with pytest.raises(WorkbenchError, match="the type of y: Tensor at the capture, and NoneType now"):
        step(x, None)
    with pytest.raises(WorkbenchError, match="the step takes x, y, as the example, and was called with 1 argument by "
                                             "position and scale by keyword$"):
        step(x, scale=2.0)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), **options)


def test_optimizer_and_clipping_are_part_of_the_step_also_with_a_short_batch_between():
    model = Net()
    eager = copy.deepcopy(model)
    ours, theirs = adamw(model), adamw(eager)
    step = compiled(model, batch(), level="full", passes=["fused_clip_adamw"], optimizer=ours, clip=0.5)
    assert step.report.ok
    for rows in (4, 3, 4):
        inputs = batch(rows)
        with warnings.catch_warnings(action="ignore"):
            loss, norm = step(*inputs)
        expected = eager(*inputs)
        expected.backward()
        torch.testing.assert_close((loss, norm), (expected, nn.utils.clip_grad_norm_(eager.parameters(), 0.5)))
        theirs.step(), theirs.zero_grad()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert ours.state_dict()["state"][0]["step"] == theirs.state_dict()["state"][0]["step"] == 3
    with torch.no_grad(), pytest.warns(UserWarning), pytest.raises(WorkbenchError, match="this step trains: call the"):
        step(*inputs)


X, Y = torch.zeros(4, 8), torch.zeros(4, 8)
NET = Net()
REFUSED: list[tuple[nn.Module, dict[str, Any], str]] = [
    (NET, {"example": 3}, "example= takes the forward's arguments as a tuple, a dict of keyword arguments or one "
                          "tensor, and got a int"),
    (NET, {"example": (X, Y, 1)}, "example= does not fit forward(x, y, scale): too many positional arguments"),
    (NET, {"example": {"x": X, "z": Y}}, "example= does not fit forward(x, y, scale): got an unexpected keyword "
                                         "argument 'z'"),
    (NET, {"example": (X.to("meta"), Y)}, "example= has a tensor on meta, and the model is on cpu"),
    (NET, {"example": (X[:, :4], Y)}, "module blocks.0.up cannot be captured at blocks.py"),
    (Branches(), {}, "it cannot be captured at test_compile.py"),
    (Cached(), {"example": (X, Y, True)}, "its forward returns a Cache, in which torch finds no tensors: return them"),
    (Net("number"), {}, "its forward returns no tensor"),
    (NET, {"level": "medium"}, "level='medium': one of light, full"),
    (NET, {"passes": "graph_cleanup"}, "passes=, takes a list of passes, and got 'graph_cleanup'"),
    (NET, {"passes": ["activation_checkpointing"]}, "'activation_checkpointing' runs on the joint stage: move it from "
                                                    "passes to joint_passes"),
    (NET, {"passes": ["full_inductor_compilation"]}, "requires 'inductor_decomposition': add it to joint_passes"),
    (NET, {"passes": ["fused_clip_adamw"]}, "'fused_clip_adamw' runs on the whole step: give optimizer=, or drop it"),
    (NET, {"clip": 1.0}, "clip= is for optimizer=: clip in your loop, behind backward()"),
    (NET, {"optimizer": torch.optim.SGD(NET.parameters())}, "optimizer= takes an AdamW, and got SGD: leave optimizer= "
                                                            "out, and call its step() in your loop"),
    (NET, {"optimizer": torch.optim.AdamW([{"params": NET.blocks[0].parameters(), "weight_decay": 0.0},
                                           {"params": NET.blocks[1].parameters()}])},
     "the optimizer's groups differ in weight_decay, and one graph has one: leave optimizer= out"),
    (TUPLE := Net("tuple"), {"optimizer": adamw(TUPLE)}, "model Net: its forward returns a tuple: float32 [], float32 "
                                                         "[4, 8]: return the mean loss alone"),
    (Net().to("meta"), {}, "its parameters are on meta: move it to a CPU or a CUDA device first"),
]


@pytest.mark.parametrize(("model", "more", "sentence"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_bad_input_is_one_sentence_and_the_model_as_it_was(model, more, sentence):
    before = {name: (value, value.requires_grad) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(WorkbenchError, match=re.escape(sentence)) as error:
        compiled(model, more.pop("example", (X, Y)), **more)
    assert "\n" not in str(error.value) and "traced" not in str(error.value)
    after = model.state_dict(keep_vars=True)
    assert {name: (value, value.requires_grad) for name, value in after.items()} == before
    assert type(model) in (Net, Branches, Cached) and model.training


def test_inference_mode_and_a_recording_of_a_cuda_graph_are_refused(monkeypatch):
    with torch.inference_mode(), pytest.raises(WorkbenchError, match="nothing can train under torch.inference_mode()"):
        compiled(NET, (X, Y))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(WorkbenchError, match="a CUDA graph is being recorded here: compile before the recording"):
        compiled(NET, (X, Y))


def test_a_model_under_fully_shard_that_is_not_adopted_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Net()
        fully_shard(model.blocks[1])
        with pytest.raises(WorkbenchError, match=r"blocks.1 is under fully_shard, whose hooks gather outside of any "
                                                 r"graph: call workbench.adopt\(model\) first"):
            compiled(model, (X, Y))
    finally:
        dist.destroy_process_group()
