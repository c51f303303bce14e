"""`compile`: a training step of the user's own module, captured and transformed, for the user's own loop."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from workbench.authoring.adopt import adopted
from workbench.authoring.authored import Authored
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError, no_exit
from workbench.graph.input_check import InputCheck
from workbench.graph.pair_function import laid_out_as
from workbench.passes.registry import find_pass
from workbench.pipeline.build import Built, Clock, build_authored, require_machine
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.report import PassRow, Report
from workbench.pipeline.roofline import Roofline
from workbench.pipeline.run_passes import Level, choose
from workbench.pipeline.stages import PairStep
from workbench.pipeline.train import apart
from workbench.recipe.contracts import Stage, check_passes
from workbench.recipe.hooks import hook_of
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import MeshSpec, ModelSpec, PassSpec, TrainingSpec, listed
from workbench.recipe.wording import counted
from workbench.torch_api.tree import tree_leaves
from workbench.world.mesh import AXES, World, all_gather_object

Passes = Sequence[PassSpec | str | Mapping[str, Any]]
SHAPE, RANK = "shape", "rank"
ALIKE = (
    "every rank has the same example, and so the same gradients: numerics cannot see a reduction that is "
    "missing: give each rank a batch of its own"
)
APART = "leave optimizer= out, and call its step() in your loop"


@no_exit()
def compile(
    model: nn.Module,
    example: Any,
    *,
    joint_passes: Passes = (),
    passes: Passes = (),
    level: Level = "full",
    optimizer: torch.optim.Optimizer | None = None,
    clip: float | None = None,
    progress: Progress = True,
) -> UserStep:
    """Capture a training step of `model`, run the passes with verdicts on each, and return what is called in its place.

        step = workbench.compile(model, example=(x, y), joint_passes=["activation_checkpointing"])
        loss = step(x, y)
        loss.backward()
        print(step.report)

    model: a plain module on one rank, on a CPU or a GPU; or one that `adopt` took, and then all of its ranks call, here
    and in each step. Its parameters stay the same objects. example: a batch of this rank as the loop will have it: a
    tuple of the forward's arguments, a dict of keyword arguments, or one tensor. Where the forward has an argument
    `use_cache`, as in transformers, it gets use_cache=False unless the example has it. level: "full" runs each pass's
    graph against the one that it received, and two training steps against eager, on the example; "light" runs no graph,
    and compares no gradients. progress: as for `run`. A FAIL is a warning, and the step runs all the same:
    `step.report.ok` tells.

    optimizer: an AdamW over all parameters, whose update becomes part of the captured step, behind clipping to a norm
    of `clip`. The forward must return the loss alone; a step then returns (loss, norm before clipping).

    Raises WorkbenchError, with the model as it was, for an example that does not fit the forward, a forward that cannot
    be traced whole, passes that break a rule, a model under `fully_shard`, and while a CUDA graph is recorded.
    """
    name = type(model).__name__
    where = f"workbench.compile of {name}"
    authored = _authored(model, where)
    with _on_all_ranks():
        _require_mode(level, where)
        call, batch = _call(model, example, where)
        _require_device(batch, authored.world.device, where)
        recipe = Recipe.model_construct(
            name=name,
            model=ModelSpec.model_construct(family=name, flavor="as it is"),
            mesh=MeshSpec.model_validate({a: n for a, n in authored.axes.items() if a in AXES}),
            joint_passes=_specs(joint_passes, f"{where}, joint_passes=,"),
            passes=_specs(passes, f"{where}, passes=,"),
            training=TrainingSpec(clip=clip),
        )
        _require_passes(recipe, authored.world, optimizer is None, where)
        kind = _kind(optimizer, clip, where)
        module = _by_position(model, call, where)
    if _alike(batch, authored) and level == "full":
        warnings.warn(f"{where}: {ALIKE}", stacklevel=3)
    authored = replace(
        authored,
        module=module,
        batch=lambda: batch,
        recipe=None if optimizer is None else recipe,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # as the loop outside will run it
    )
    device, rank = authored.world.device.type, authored.world.rank
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    # or the second of two steps under one autocast would read the weights of the first
    uncached = torch.autocast(device, dtype, enabled, cache_enabled=False)
    with torch.enable_grad(), uncached, telling(rank == 0 and progress) as tell:
        try:
            built = build_authored(recipe, authored, kind, level=level, clock=Clock(tell))
        except WorkbenchError as error:  # another capture is none to choose here
            raise WorkbenchError(str(error).partition(", or try capture")[0]) from error
    built.step.pair.inputs = replace(built.step.pair.inputs, names=call.names)
    step = UserStep(model, recipe, built, level, call, where)
    if rank == 0 and not step.report.ok:
        warnings.warn(f"{where}: a verdict is FAIL: print(step.report)", stacklevel=3)
    return step


@dataclass(frozen=True)
class Call:
    """How a forward is called: names of its arguments, how many come by position, and keywords that never change."""

    names: list[str]
    positional: int
    fixed: dict[str, Any]


class UserStep:
    """What `compile` returns. Called as the example was, it returns what the model's forward returns.

    built: the graphs, and the compiled step. Where the captured step does not hold, the model itself runs, and a
    warning says why, once: without gradients, in another mode than at the capture (eval), under another autocast, with
    other frozen parameters, and for a batch of another shape. Arguments of another kind are errors.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        built: Built,
        level: Level,
        call: Call,
        where: str,
    ) -> None:
        self.model, self.built, self.level = model, built, level
        self._recipe, self._call, self._where = recipe, call, where
        self._modules, self._parameters = dict(model.named_modules()), dict(model.named_parameters())
        self._told: set[str] = set()
        self._captured = self._settings()
        size = built.authored.world.size
        self._group = dist.new_group(backend="gloo") if size > 1 else None

    @property
    def records(self) -> list[PassRecord]:
        return self.built.records

    @property
    def report(self) -> Report:
        """The verdicts on this rank, by what is known now; `print` shows them as a table."""
        built, world = self.built, self.built.authored.world
        return Report(
            recipe=self._recipe,
            world={"kind": world.kind, "size": world.size, "axes": built.authored.axes},
            level=self.level,
            machine=machine(),
            versions=versions(),
            seconds=built.seconds,
            passes=[PassRow.of(record) for record in built.records],
            schedule=built.schedule,
            pipeline=built.pipeline,
            roofline=Roofline(0.0, ""),
            saved_bytes=built.saved_bytes,
            not_run="" if self.level == "full" else "level light runs no graph: ask for level full",
        )

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        batch, what, reason = self._checked(args, keywords)
        if not reason:
            return self.built.step(*batch)
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"{self._where}: {reason}: the model itself runs", stacklevel=2)
        if self.built.step.optimizer is None:
            return self.model(*args, **keywords, **self._call.fixed)
        if what not in (SHAPE, RANK):
            raise WorkbenchError(f"{self._where}: {reason}, and this step trains: call the model itself")
        return self._eager_update(batch)

    def _checked(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], str, str]:
        """The values by position, what differs from the capture, and the reason not to run it.

        Where a rank runs the model itself, or refuses its arguments, all do: the captured step has other collectives.
        """
        refusal, what, reason = None, "", ""
        batch: tuple[Any, ...] = ()
        try:
            batch = self._batch(args, keywords)
            what, reason = self._why_eager(batch)
            if not reason and self._group is not None:  # one rank's step asks by itself
                self.built.step.pair.inputs.require(type(self.model).__name__, batch)
        except WorkbenchError as error:
            refusal = error
        if self._group is not None:
            gravest = torch.tensor(2 if refusal else int(bool(reason)))
            dist.all_reduce(gravest, dist.ReduceOp.MAX, group=self._group)
            if gravest == 2 and refusal is None:
                refusal = WorkbenchError(f"{self._where}: another rank refuses its arguments")
            if gravest == 1 and not reason:
                what, reason = RANK, "another rank does not run the captured step"
        if refusal is not None:
            raise refusal
        return batch, what, reason

    def _batch(self, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values by position, as the example had them."""
        by_name = self._call.names[len(args):]
        if len(args) > self._call.positional or set(by_name) != set(keywords):
            by_keyword = f" and {', '.join(keywords)} by keyword" if keywords else ""
            raise WorkbenchError(
                f"{self._where}: the step takes {', '.join(self._call.names)}, as the example, and was called with "
                f"{counted(len(args), 'argument')} by position{by_keyword}"
            )
        values = *args, *(keywords[name] for name in by_name)
        return tuple(map(_as_captured, self.built.authored.example_batch(), values))

    def _settings(self) -> dict[str, list[Any]]:
        """What a graph fixes, beside shapes: `training` of all modules, `requires_grad` of all parameters, autocast."""
        device = self.built.authored.world.device.type
        return {
            "training": [module.training for module in self._modules.values()],
            "requires_grad": [parameter.requires_grad for parameter in self._parameters.values()],
            "autocast": [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)],
        }

    def _why_eager(self, batch: tuple[Any, ...]) -> tuple[str, str]:
        """(what differs, the reason) where the captured step does not hold; two empty texts where it does."""
        if not torch.is_grad_enabled():
            return "gradients", "gradients are off"
        for what, now in self._settings().items():
            if now != self._captured[what]:
                names = {"training": self._modules, "requires_grad": self._parameters}.get(what, [""])
                rows = zip(names, self._captured[what], now, strict=True)
                name, was, becomes = next(row for row in rows if row[1] != row[2])
                where = name or "the model"
                return what, f"{what} of {where} is {becomes} now, and was {was} at the capture"
        differences = list(self.built.step.pair.inputs.differences(batch))
        shapes = [row for row in differences if row[1] == SHAPE]
        if shapes and all(what in (SHAPE, "stride") for _, what, *_ in differences):
            name, _, was, becomes = shapes[0]
            return SHAPE, f"the shape of {name} is {becomes} now, and was {was} at the capture"
        return "", ""

    def _eager_update(self, batch: tuple[Any, ...]) -> Any:
        optimizer = self.built.step.optimizer
        assert optimizer is not None
        for state in optimizer.state.values():  # one count serves all parameters in the captured step
            state["step"] = state["step"].clone()
        return apart(self.built.authored, self.built.authored.module, optimizer)(*batch)

    def close(self) -> None:
        """Free the CUDA graphs that the step holds, before the process groups end."""
        self.built.step.close()

    def __repr__(self) -> str:
        return f"UserStep({self.built!r})"


@contextmanager
def _on_all_ranks() -> Iterator[None]:
    """A refusal inside is one on every rank: each must come here."""
    refusal = None
    try:
        yield
    except WorkbenchError as error:
        refusal = error
    texts = all_gather_object("" if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(texts):
        if text:
            raise WorkbenchError(f"rank {rank}: {text}")


def _require_mode(level: str, where: str) -> None:
    if level not in get_args(Level):
        raise WorkbenchError(f"{where}: level={level!r}: one of {', '.join(get_args(Level))}")
    if torch.is_inference_mode_enabled():
        raise WorkbenchError(f"{where}: nothing can train under torch.inference_mode(): leave it first")
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise WorkbenchError(f"{where}: a CUDA graph is being recorded here: compile before the recording begins")


def _authored(model: nn.Module, where: str) -> Authored:
    """The adopted model, or another on its one rank. WorkbenchError for another that several ranks hold together."""
    if (authored := adopted(model)) is not None:
        return authored
    for path, part in model.named_modules():
        if isinstance(part, FSDPModule):
            raise WorkbenchError(
                f"{where}: {path or 'the model'} is under fully_shard, whose hooks gather outside of any graph: "
                "call workbench.adopt(model) first"
            )
    parameters = list(model.parameters())
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1 or any(isinstance(parameter, DTensor) for parameter in parameters):
        raise WorkbenchError(
            f"{where}: nothing averages its gradients over the {ranks} ranks: put it under fully_shard and call "
            "workbench.adopt(model), or start one rank"
        )
    device = parameters[0].device if parameters else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise WorkbenchError(f"{where}: its parameters are on {device}: move it to a CPU or a CUDA device first")
    world = World("nccl" if device.type == "cuda" else "gloo", 1, 0, device)
    return Authored(model, world, None, [], {})


def _call(model: nn.Module, example: Any, where: str) -> tuple[Call, tuple[Any, ...]]:
    """How the example is given, and its values in order. WorkbenchError where it does not fit the forward."""
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(example, Mapping):
        named = dict(example)
    elif isinstance(example, tuple | list):
        positional = tuple(example)
    elif isinstance(example, torch.Tensor):
        positional = (example,)
    else:
        raise WorkbenchError(
            f"{where}: example= takes the forward's arguments as a tuple, a dict of keyword arguments or one tensor, "
            f"and got a {type(example).__name__}"
        )
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise WorkbenchError(f"{where}: example= does not fit forward({takes}): {error}") from None
    fixed: dict[str, Any] = {}
    if "use_cache" in signature.parameters and "use_cache" not in bound.arguments:
        fixed["use_cache"] = False
    names = InputCheck.of(positional, model.forward).names
    # one tensor for two arguments, as tokens are their own labels, would be one input of the graph
    batch = tuple(map(_copied, (*positional, *named.values())))
    return Call([*names, *named], len(names), fixed), batch


def _copied(value: Any) -> Any:
    """A tensor of its own memory without gaps; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _as_captured(example: Any, value: Any) -> Any:
    """A tensor in the strides of the capture, where nothing else differs: a slice of tokens and targets has gaps."""
    if not isinstance(value, torch.Tensor) or not isinstance(example, torch.Tensor):
        return value
    same = (value.shape, value.dtype, value.device) == (example.shape, example.dtype, example.device)
    return laid_out_as(example, value) if same else value


def _by_position(model: nn.Module, call: Call, where: str) -> nn.Module:
    """The model, or where it takes keywords a module on the same parameters and children that takes all by position."""
    count, kind = call.positional, type(model)
    if count == len(call.names) and not call.fixed:
        return model
    if "forward" in vars(model):
        raise WorkbenchError(f"{where}: its forward was replaced on the object: give the example as a tuple")

    def forward(self: Any, *values: Any) -> Any:
        keywords = dict(zip(call.names[count:], values[count:], strict=True))
        return kind.forward(self, *values[:count], **keywords, **call.fixed)

    module = copy.copy(model)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "forward": forward})
    return module


def _alike(batch: tuple[Any, ...], authored: Authored) -> bool:
    """Whether ranks that should have different batches have the same, by the sums of its tensors."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    sums = [leaf.double().sum().item() for leaf in tensors]
    parallel = any(axis != "tp" for axis in authored.axes)
    return parallel and all(other == sums for other in all_gather_object(sums))


def _require_device(batch: tuple[Any, ...], device: torch.device, where: str) -> None:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise WorkbenchError(f"{where}: example= has a tensor on {leaf.device}, and the model is on {device}")


def _specs(specs: Passes, where: str) -> tuple[PassSpec, ...]:
    names = listed(specs, where)
    for spec in names:
        choose(spec, tuple(Stage), where)
    return tuple(PassSpec.model_validate(spec) for spec in names)


def _require_passes(recipe: Recipe, world: World, apart: bool, where: str) -> None:
    """Raise WorkbenchError for lists that break a rule. apart: whether the optimizer runs outside of the step."""
    names = [[spec.name for spec in specs] for specs in (recipe.joint_passes, recipe.passes)]
    problems = check_passes(*names)
    for name in recipe.pass_names:
        contract = find_pass(name).contract
        if "pair" in contract.needs and not apart:
            problems.append(f"pass {name!r} needs forward and backward apart: {APART}, or drop it")
        if contract.stage is Stage.STEP and apart:
            problems.append(f"pass {name!r} runs on the whole step: give optimizer=, or drop it")
    if problems:
        raise WorkbenchError(f"{where}: {'; '.join(problems)}")
    require_machine(recipe, world.kind, where)


def _kind(optimizer: torch.optim.Optimizer | None, clip: float | None, where: str) -> PairStep:
    """The kind of step: with the optimizer inside, or without. WorkbenchError where it cannot be inside."""
    if optimizer is None:
        if clip is not None:
            raise WorkbenchError(f"{where}: clip= is for optimizer=: clip in your loop, behind backward()")
        return PairStep()
    if not isinstance(optimizer, torch.optim.AdamW):
        raise WorkbenchError(f"{where}: optimizer= takes an AdamW, and got {type(optimizer).__name__}: {APART}")
    for option in ("betas", "eps", "weight_decay"):
        values = {group[option] for group in optimizer.param_groups}
        if len(values) > 1:
            raise WorkbenchError(
                f"{where}: the optimizer's groups differ in {option}, and one graph has one: {APART}"
            )
    kind: PairStep = hook_of("training.step", "whole")(optimizer)
    return kind
