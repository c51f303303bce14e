"""A training step traced by make_fx: forward, loss and `autograd.grad` in one graph, without Dynamo and AOTAutograd.

Source: torch/fx/experimental/proxy_tensor.py, torch/_functorch/_aot_autograd (functionalization, and the hooks that
number the backward's nodes by the forward operators that they belong to).
"""

from __future__ import annotations

import contextlib
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._functorch._aot_autograd.utils import copy_fwd_metadata_to_bw_nodes
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from workbench.torch_api.aot import Graph

_LOCAL, _TORCH, _HERE = (
    "_local_tensor",
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
)


@dataclass
class TracedStep:
    """A traced step, whose parts are named as those of torch's `JointWithDescriptors`.

    graph_module: takes (primals, tangents), returns (new values of buffers and the loss, gradients). params_spec,
    buffers_spec: qualified names in calling order.
    """

    graph_module: Graph
    params_spec: list[str]
    buffers_spec: list[str]
    tracing_context: TracingContext = field(repr=False)


class Untraceable(Exception):
    """The forward does what a traced step would leave out."""


def trace_step(
    module: nn.Module, args: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None
) -> TracedStep:
    """Trace `module(*args)`, a scalar loss, and its gradient by each parameter that requires one.

    Local shards take the place of DTensors, as inputs and as gradients. Raises Untraceable where the forward writes a
    parameter or an input, or returns no scalar that depends on one, and torch's errors.
    """
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    tensors = (*parameters.values(), *buffers.values(), *args)
    table = dict(decompositions) if decompositions is not None else None
    trace = _Trace(module, parameters, buffers)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = [_fake(value, mode) for value in tensors]
    with mode:
        tangent = torch.ones((), device=inputs[0].device)
    context = TracingContext(mode)
    with (
        tracing(context),
        _noted_modules(module),
        torch.enable_grad(),
        enable_python_dispatcher(),
        mode,
        mock.patch.object(torch.fx.traceback, "set_stack_trace", _set_stack_trace),
    ):
        graph = make_fx(trace, table, record_stack_traces=True)(inputs, [tangent])
    mode.allow_non_fake_inputs = True  # for passes, as after Dynamo's capture
    trace.describe(graph)
    copy_fwd_metadata_to_bw_nodes(graph)
    _copy_lines(graph)
    return TracedStep(graph, list(parameters), list(buffers), context)


def _set_stack_trace(stack: Sequence[str]) -> None:
    """torch 2.11 keeps the last trace where there is none: all of a backward then counts as gradient accumulation."""
    meta = torch.fx.traceback.get_current_meta()
    meta.pop("stack_trace", None)
    if stack:
        meta["stack_trace"] = "".join(stack)


@dataclass
class _Trace:
    """The function that make_fx traces."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    written: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)

    def __call__(self, primals: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        off = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        )
        with off, FunctionalTensorMode(_allow_token_discovery=True):
            mode = get_proxy_mode()
            assert mode is not None
            tracer: Any = mode.tracer
            tracer._filter_traceback_frames = _own_frames
            inputs = [to_fun(value) for value in primals]
            state = self.parameters | self.buffers
            locals_by_name = dict(zip(state, inputs, strict=False))
            tensors = {name: _rewrapped(locals_by_name[name], state[name]) for name in state}
            weights = {name: tensors[name] for name in self.parameters}
            for weight in weights.values():
                weight._is_param = True  # type: ignore[attr-defined]  # for isinstance
            loss = _call_stateless(self.module, tensors, tuple(inputs[len(state):]))
            if not isinstance(loss, torch.Tensor) or loss.dim() or loss.grad_fn is None:
                raise Untraceable(
                    "its forward returns no scalar tensor that depends on a parameter: return the mean "
                    "loss"
                )
            for node in tracer.graph.nodes:
                node.meta["partitioner_tag"] = "is_forward"
            fixed = {f"parameter {name}": weight for name, weight in weights.items()}
            fixed |= {f"input {n}": value for n, value in enumerate(inputs[len(state):], 1)}
            for what, value in fixed.items():
                if isinstance(value, torch.Tensor) and has_data_mutation(value):
                    raise Untraceable(
                        f"{what} is written in the forward: write between the steps, under "
                        "torch.no_grad(), or into a copy"
                    )
            setup_stacktrace_preservation_hooks([loss.grad_fn])
            trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
            tangents = [to_fun(tangent).to(loss.dtype) for tangent in tangents]
            gradients = torch.autograd.grad(
                loss, list(trained.values()), tangents, allow_unused=True
            )
            shards = {
                name: from_fun(getattr(gradient, _LOCAL, gradient))
                for name, gradient in zip(trained, gradients, strict=True)
                if gradient is not None
            }
            self.gradients = list(shards)
            self.written = [
                name for name in self.buffers if has_data_mutation(locals_by_name[name])
            ]
            news = [from_fun(locals_by_name[name]) for name in self.written]
            return [*news, from_fun(loss)], list(shards.values())

    def describe(self, graph: Graph) -> None:
        """Give inputs and outputs torch's descriptors, and the nodes of the backward their tag."""
        nodes = graph.graph.find_nodes(op="placeholder")
        inputs: dict[str, Any] = {name: descriptors.ParamAOTInput(name) for name in self.parameters}
        inputs |= {name: descriptors.BufferAOTInput(name) for name in self.buffers}
        batch = [descriptors.PlainAOTInput(i) for i in range(len(nodes) - len(inputs) - 1)]
        loss = descriptors.PlainAOTOutput(0)
        descs = [*inputs.values(), *batch, descriptors.TangentAOTInput(loss)]
        for i, (node, desc) in enumerate(zip(nodes, descs, strict=True), 1):
            node.meta["desc"] = desc
            tangent = desc.is_tangent()
            # as AOTAutograd names them
            node.name = node.target = "tangents_1" if tangent else f"primals_{i}"
            node.meta["partitioner_tag"] = "is_backward" if tangent else "is_forward"
        outputs = [descriptors.InputMutationAOTOutput(inputs[name]) for name in self.written]
        gradients = [descriptors.GradAOTOutput(inputs[name]) for name in self.gradients]
        graph.graph.output_node().meta["desc"] = [*outputs, loss, *gradients]
        for node in graph.graph.nodes:
            if node.op != "output":
                node.meta.setdefault("partitioner_tag", "is_backward")
        graph.recompile()


def _call_stateless(
    module: nn.Module, tensors: dict[str, torch.Tensor], args: tuple[Any, ...]
) -> Any:
    """The module on other parameters and buffers; its parts keep the attributes that they had before."""
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    try:
        return torch.func.functional_call(module, tensors, args)
    finally:
        for part, before in attributes:
            vars(part).clear()
            vars(part).update(before)


@contextlib.contextmanager
def _noted_modules(module: nn.Module) -> Iterator[None]:
    """Each node gets the stack of modules whose forward it was traced in."""
    names = {id(part): (path, type(part)) for path, part in reversed([*module.named_modules()])}
    call, stack = nn.Module._call_impl, [OrderedDict[str, Any]()]

    def called(part: nn.Module, *args: Any, **kwargs: Any) -> Any:  # hooks of the part included
        outer = stack[-1]
        path, kind = names.get(id(part), ("", type(part)))
        stack.append(OrderedDict({**outer, path: (path, kind)}))
        torch.fx.traceback.current_meta["nn_module_stack"] = stack[-1]
        try:
            return call(part, *args, **kwargs)
        finally:  # torch replaces the dict where it traces a higher-order operator
            stack.pop()
            torch.fx.traceback.current_meta.pop("nn_module_stack", None)
            if outer:
                torch.fx.traceback.current_meta["nn_module_stack"] = outer

    with mock.patch.object(nn.Module, "_call_impl", called):
        yield


def _own_frames(stack: traceback.StackSummary) -> traceback.StackSummary:
    """The model's frames, from its forward on; torch would keep those alone that are called forward."""
    first = next((i for i, frame in enumerate(stack) if frame.name == "forward"), len(stack))
    return traceback.StackSummary.from_list(
        [frame for frame in stack[first:] if not frame.filename.startswith((_TORCH, _HERE))])


def _copy_lines(graph: Graph) -> None:
    """Nodes of the backward get the source line of the forward operator that they belong to."""
    lines: dict[Any, Any] = {}
    for node in graph.graph.nodes:
        if node.meta.get("partitioner_tag") == "is_forward" and node.meta.get("stack_trace"):
            lines.setdefault(node.meta.get("seq_nr"), node.meta["stack_trace"])
    for node in graph.graph.nodes:
        line = lines.get(node.meta.get("seq_nr"))
        if (
            line is not None
            and node.meta.get("partitioner_tag") == "is_backward"
            and node.op == "call_function"
        ):
            node.meta["stack_trace"] = line


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor of this mode like a tensor, or like a DTensor's shard; its sizes are constants."""
    if not isinstance(value, torch.Tensor):
        return value
    local = getattr(value, _LOCAL, value)
    with mode:
        return torch.empty_strided(
            local.shape, local.stride(), dtype=local.dtype, device=local.device
        )


def _rewrapped(local: Any, like: torch.Tensor) -> torch.Tensor:
    """A DTensor as `like` is around another shard, or the tensor itself; a leaf of autograd where `like` is one."""
    if not hasattr(like, _LOCAL):
        return local.requires_grad_() if like.requires_grad else local
    names, how = like.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: local if name == _LOCAL else getattr(like, name) for name in names}
    kind: Any = type(like)  # also of a Parameter
    return kind.__tensor_unflatten__(parts, how, like.shape, like.stride()).requires_grad_(
        like.requires_grad
    )
