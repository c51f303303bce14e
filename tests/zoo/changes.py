"""Odd modules that ask torch about tensors, modes and the trace, or whose surroundings change between the steps."""

from __future__ import annotations

import enum
import functools
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, SEQ, Written, odd, written

WAS = "attribute ['\"]{}['\"] was .* at the capture and is .* now, .*: capture again, or make it a buffer"
OUTSIDE = "['\"]{}['\"] of Python module zoo.changes was .* at the capture and is .* now, .*: capture again, or give it"
FOLLOW = "its {} changed since the capture, which the compiled step would not follow: capture again"


# what is asked: whether this is a trace, and what autograd knows of a tensor


def asked(name: str, ask: Callable[[Any, Tensor], Any], refused: str = "", traced: str = "") -> None:
    odd(name, refused=refused, traced=traced)(lambda: Written(
        lambda m, x: x * 2 if ask(m, x) else x, mean=torch.ones(DIM)))


CANNOT = "module body cannot be captured at changes.py:.*"
TENSORS = "module body reads a tensor's '{}' in its forward, which the compiled step would not do: read it between"
READS = "it reads a weight's '{}' in its forward, where the weight may be gathered: read it between the steps"
asked("is_compiling", lambda m, x: torch.compiler.is_compiling())
asked("is_compiling of Dynamo", lambda m, x: torch._dynamo.is_compiling())
asked("is_compiling of torch's utilities", lambda m, x: torch._utils.is_compiling())
asked("is_dynamo_compiling", lambda m, x: torch.compiler.is_dynamo_compiling())
asked("is_exporting", lambda m, x: torch.compiler.is_exporting())
asked("is_tracing of TorchScript", lambda m, x: torch.jit.is_tracing())
asked("deterministic algorithms", lambda m, x: torch.are_deterministic_algorithms_enabled(),
      CANNOT + "whether torch's algorithms are deterministic", "it asks whether torch's algorithms are deterministic")
asked("is_leaf of an activation", lambda m, x: x.is_leaf)
asked("is_leaf of a weight", lambda m, x: m.layer.weight.is_leaf, TENSORS.format("is_leaf"),
      READS.format("is_leaf"))
asked("is_leaf of a buffer", lambda m, x: m.mean.is_leaf)
asked("requires_grad of an activation", lambda m, x: x.requires_grad)
asked("requires_grad of a weight", lambda m, x: m.layer.weight.requires_grad)
asked("the grad_fn of an activation", lambda m, x: x.grad_fn is None, CANNOT + "tensors with a grad_fn")
asked("the grad_fn of a weight", lambda m, x: m.layer.weight.grad_fn is None, CANNOT + "tensors with a grad_fn",
      READS.format("grad_fn"))
asked("the gradient of an activation", lambda m, x: x.grad is None, "module body reads a tensor's 'grad'")
asked("whether a weight is a parameter", lambda m, x: isinstance(m.layer.weight, nn.Parameter))
asked("the device", lambda m, x: x.device.type == m.layer.weight.device.type == "cpu")
asked("autocast's mode", lambda m, x: torch.is_autocast_enabled("cpu"))


# what changes between the steps


def changing(name: str, function: Callable[[Any, Tensor], Any], change: Callable[[Any], Any], refused: str,
             **parts: Callable[[], Any]) -> None:
    """`change` gets the module after each step."""
    odd(name, refused=refused, traced=refused, between=change)(
        lambda: Written(function, **{part: make() for part, make in parts.items()}))


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


class Setting:
    scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


class Scaled(Written):
    scale = 1.0

    @property
    def twice(self) -> float:
        return 2 * self.half

    half = 1.0


def _grow(kept: Any, key: Any) -> None:
    kept[key] = kept[key] + 1


def _global(_: Any) -> None:
    global SCALE
    SCALE += 1


def _helper(x: Tensor) -> Tensor:
    return x * SCALE


def _of_default(m: Any, x: Tensor, scale: list[float] = [1.0]) -> Tensor:  # noqa: B006 (the row is about it)
    return x * scale[0]


def _closed() -> tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]:
    scale = [1.0]
    return lambda m, x: x * scale[0], lambda m: _grow(scale, 0)


def _environment(_: Any) -> None:
    os.environ["ZOO_SCALE"] = str(1 + float(os.environ["ZOO_SCALE"]))


SCALE, SCALES, NAMED, SETTING = 1.0, [1.0], {"scale": 1.0}, Setting()
os.environ["ZOO_SCALE"] = "1"
changing("a number that is set", lambda m, x: x * m.kept, lambda m: setattr(m, "kept", m.kept + 1),
         WAS.format("kept"), kept=lambda: 1.0)
changing("a list whose item is set", lambda m, x: x * m.kept[0], lambda m: _grow(m.kept, 0), WAS.format("kept(.0.)?"),
         kept=lambda: [1.0])
changing("a list that grows", lambda m, x: x * len(m.kept), lambda m: m.kept.append(1), WAS.format("kept"),
         kept=lambda: [1.0])
changing("a dictionary whose item is set", lambda m, x: x * m.kept["a"], lambda m: _grow(m.kept, "a"),
         WAS.format("kept.*"), kept=lambda: {"a": 1.0})
changing("a dictionary that gets a key", lambda m, x: x * m.kept.get("b", 2.0), lambda m: m.kept.update(b=3.0),
         WAS.format("kept.*"), kept=lambda: {"a": 1.0})
changing("a dictionary in a list", lambda m, x: x * m.kept[0]["a"], lambda m: _grow(m.kept[0], "a"),
         WAS.format("kept.*"), kept=lambda: [{"a": 1.0}])
changing("a set that grows", lambda m, x: x * 2 if "a" in m.kept else x, lambda m: m.kept.add("a"), WAS.format("kept"),
         kept=lambda: {"b"})
changing("a tuple that is another", lambda m, x: x * m.kept[0], lambda m: setattr(m, "kept", (2.0,)),
         WAS.format("kept.*"), kept=lambda: (1.0,))
changing("an array that changes", lambda m, x: x * torch.from_numpy(m.kept), lambda m: _grow(m.kept, 0),
         WAS.format("kept"), kept=lambda: np.ones(DIM, np.float32))
changing("a mode that changes", lambda m, x: x if m.kept is Mode.ONE else -x, lambda m: setattr(m, "kept", Mode.TWO),
         WAS.format("kept"), kept=lambda: Mode.ONE)
changing("an object that is another", lambda m, x: x * m.kept.scale,
         lambda m: setattr(m, "kept", SimpleNamespace(scale=2.0)), WAS.format("kept.scale"),
         kept=lambda: SimpleNamespace(scale=1.0))
changing("a list of an object", lambda m, x: x * m.kept.scales[0], lambda m: _grow(m.kept.scales, 0),
         WAS.format("kept.scales.*"), kept=lambda: SimpleNamespace(scales=[1.0]))
changing("a method of an object", lambda m, x: m.kept.scaled(x), lambda m: setattr(m.kept, "scale", m.kept.scale + 1),
         WAS.format("kept.scale"), kept=Setting)
changing("an object behind a weak reference", lambda m, x: x * m.kept().scale,
         lambda m: setattr(SETTING, "scale", SETTING.scale + 1), WAS.format(r"kept\(\).scale"),
         kept=lambda: weakref.ref(SETTING))
changing("a function that is another", lambda m, x: m.kept(x), lambda m: setattr(m, "kept", torch.tanh),
         WAS.format("kept"), kept=lambda: torch.relu)
changing("a partial function that is another", lambda m, x: m.kept(x),
         lambda m: setattr(m, "kept", functools.partial(torch.mul, other=3.0)), WAS.format("kept.*"),
         kept=lambda: functools.partial(torch.mul, other=2.0))
changing("an attribute that comes", lambda m, x: x * 2 if hasattr(m, "late") else x, lambda m: setattr(m, "late", 1),
         WAS.format("late"))
changing("a global number that is set", lambda m, x: x * SCALE, _global, OUTSIDE.format("SCALE"))
changing("a global number of a helper", lambda m, x: _helper(x), _global, OUTSIDE.format("SCALE"))
changing("a global list whose item is set", lambda m, x: x * SCALES[0], lambda m: _grow(SCALES, 0),
         OUTSIDE.format("SCALES.*"))
changing("a global dictionary whose item is set", lambda m, x: x * NAMED["scale"], lambda m: _grow(NAMED, "scale"),
         OUTSIDE.format("NAMED.*"))
changing("a global object whose number is set", lambda m, x: SETTING.scaled(x),
         lambda m: setattr(SETTING, "scale", SETTING.scale + 1), OUTSIDE.format("SETTING.scale"))
changing("a number of a class that is set", lambda m, x: x * Setting.scale,
         lambda m: setattr(Setting, "scale", Setting.scale + 1), OUTSIDE.format("Setting.scale"))
changing("a default whose item is set", _of_default, lambda m: _grow(_of_default.__defaults__[0], 0),
         WAS.format("function.__defaults__.*"))
changing("a list of a closure whose item is set", *_closed(), WAS.format("function.__closure__.*"))
changing("an environment variable that is set", lambda m, x: x * float(os.environ["ZOO_SCALE"]), _environment,
         "environment variable 'ZOO_SCALE' was .* at the capture")
changing("an environment variable by getenv", lambda m, x: x * float(os.getenv("ZOO_SCALE", "1")), _environment,
         "environment variable 'ZOO_SCALE' was .* at the capture")
changing("a hook that comes", lambda m, x: m.head(x),
         lambda m: m.head.register_forward_hook(lambda part, given, out: out * 2),
         "body.head: " + FOLLOW.format("hooks"), head=lambda: nn.Linear(DIM, DIM))
changing("a module that is another", lambda m, x: m.act(x), lambda m: setattr(m, "act", nn.Tanh()),
         "body: " + FOLLOW.format("submodules"), act=nn.ReLU)
changing("modules in another order", lambda m, x: functools.reduce(lambda y, part: part(y), m.parts.values(), x),
         lambda m: m.parts.update({"first": m.parts.pop("first")}), "body.parts: " + FOLLOW.format("submodules"),
         parts=lambda: nn.ModuleDict({"first": nn.ReLU(), "second": nn.Sigmoid()}))
changing("a buffer that is gone", lambda m, x: x if m.mean is None else x * m.mean,
         lambda m: setattr(m, "mean", None), "body: " + FOLLOW.format("buffers"), mean=lambda: torch.ones(DIM))
changing("a buffer of another dtype", lambda m, x: (x * m.mean).float(), lambda m: setattr(m, "mean", m.mean.double()),
         "body: " + FOLLOW.format("buffers"), mean=lambda: torch.ones(DIM))
changing("a buffer that is another", lambda m, x: x * m.mean, lambda m: setattr(m, "mean", m.mean + 1), "",
         mean=lambda: torch.ones(DIM))
changing("a buffer that is written", lambda m, x: x * m.mean, lambda m: m.mean.add_(1), "",
         mean=lambda: torch.ones(DIM))
changing("what the forward does not read", lambda m, x: x * m.kept[0], lambda m: (
    setattr(m, "other", 1), m.seen.append(1), _grow(m.named, "step")), "", kept=lambda: [1.0], seen=list,
    named=lambda: {"step": 0})


def _class(make: Callable[[], nn.Module], refused: str, between: Callable[[Any], None]) -> None:
    odd(f"a number by {refused}", refused=WAS.format(refused), traced=WAS.format(refused), between=between)(make)


_class(lambda: Scaled(lambda m, x: x * m.scale), "scale", lambda m: setattr(Scaled, "scale", Scaled.scale + 1))
_class(lambda: Scaled(lambda m, x: x * m.twice), "half", lambda m: setattr(m, "half", m.half + 1))


def _wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(*given: Any, **named: Any) -> Any:
        return forward(*given, **named)

    return called


class Decorated(Written):
    forward = _wrapped(Written.forward)


_class(lambda: Decorated(lambda m, x: x * m.kept, kept=1.0), "kept", lambda m: setattr(m, "kept", m.kept + 1))


# generators, and other ways


class DoublesSines(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.sin else found


def _seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand(DIM)


def _forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x * torch.rand(DIM)


def _doubled_sines(m: Any, x: Tensor) -> Tensor:
    with DoublesSines():
        return torch.sin(x)


def _inference(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = m.mean * 2
    return x * scale.shape[0]


def _gradient_again(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), torch.enable_grad():
        return m.head(x)


def _cells(m: Any, x: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for i in range(SEQ):
        state = m.cell(x[:, i], state)
        found.append(state)
    return torch.stack(found, 1)


def both(name: str, function: Callable[[Any, Tensor], Any], refused: str = "", traced: str = "",
         **parts: Callable[[], Any]) -> None:
    odd(name, refused=refused, traced=traced)(
        lambda: Written(function, **{part: make() for part, make in parts.items()}))


SEEDS = "it calls torch's {} in its forward, which a traced step would not do: call it between the steps"
both("a seed in the forward", _seeded, CANNOT + "it reads or sets the seed", SEEDS.format("manual_seed"))
both("a fork of the generator", _forked, "module body cannot be captured at .*it draws", SEEDS.format("fork_rng"))
both("the initial seed", lambda m, x: x * (torch.initial_seed() % 7), CANNOT, SEEDS.format("initial_seed"))
both("a tensor that is formatted", lambda m, x: x * len(str(x)), CANNOT, "it formats a tensor in its forward, ")
both("a mode of torch's functions", _doubled_sines)
both("inference mode inside", _inference, mean=lambda: torch.ones(DIM))
both("gradients inside of no gradients", _gradient_again, head=lambda: nn.Linear(DIM, DIM))
both("a function's gradient", lambda m, x: torch.func.grad(lambda y: y.pow(3).sum())(x))
both("a directional derivative", lambda m, x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1])
both("a vmap that reads a buffer", lambda m, x: torch.func.vmap(lambda row: torch.tanh(row) * m.mean)(x),
     mean=lambda: torch.ones(DIM))
both("attention in evaluation", lambda m, x: m.attend(x, x, x, need_weights=False)[0],
     attend=lambda: nn.MultiheadAttention(DIM, 2, batch_first=True).eval())
both("an encoder layer in evaluation", lambda m, x: m.encode(x),
     encode=lambda: nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True).eval())
both("a loop over GRU cells", _cells, cell=lambda: nn.GRUCell(DIM, DIM))
both("a constant of NumPy", lambda m, x: x * torch.from_numpy(np.sin(np.arange(DIM)).astype(np.float32)))
both("layers that are dropped at random", lambda m, x: x * (torch.rand(()) < 0.5))
written("a checkpoint that draws again", lambda m, x: checkpoint(
    lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False, preserve_rng_state=False),
    refused="module body draws random numbers in a checkpoint with preserve_rng_state=False, .*: leave that")
written("a checkpoint without a generator that draws nothing", lambda m, x: checkpoint(
    torch.sin, x, use_reentrant=False, preserve_rng_state=False))
