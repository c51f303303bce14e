"""The conditions under which a model's training step can be captured, checked between Dynamo and AOTAutograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from workbench.authoring.authored import Authored
from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import described
from workbench.recipe.hooks import hook_of, values_of
from workbench.recipe.wording import few
from workbench.torch_api import aot
from workbench.torch_api.module_paths import module_path
from workbench.torch_api.ops import storage_key
from workbench.torch_api.refusals import (
    is_users,
    kind_of_result,
    place,
    reason,
    refused_module,
    unknown_result,
    without_results,
)
from workbench.torch_api.tree import tree_leaves

NO_TENSOR = "its forward returns no tensor: return the mean loss, a scalar tensor"


def require_trainable(authored: Authored, graph: GraphModule, args: tuple[Any, ...]) -> None:
    """Raise WorkbenchError, with the model, the parameter or module, and the remedy, for a model that cannot train.

    graph: Dynamo's graph of `authored.module`, called with `args`. A recipe's model must return one scalar loss. A
    module without a recipe may return anything that its caller can call `backward` on.
    """
    module = authored.module
    problems = chain(
        _of_parameters(module), _of_results(authored, graph, args), _of_writes(module, graph, args)
    )
    if problem := next(problems, ""):
        raise WorkbenchError(f"{named(authored)}: {problem}")


def require_known_meshes(authored: Authored, joint: GraphModule) -> None:
    """Raise WorkbenchError for a result on a mesh that no input has: torch would take that of the tangent."""
    output = joint.graph.output_node()
    for node, desc in zip(*map(tree_leaves, (output.args[0], output.meta["desc"])), strict=True):
        if isinstance(node, Node) and aot.is_tangent(node) and not desc.is_grad():
            raise WorkbenchError(
                f"{named(authored)}: its forward returns a DTensor on a mesh that no parameter has: return its "
                "to_local() or its full_tensor()"
            )


def require_parameters(authored: Authored) -> None:
    """The part of `require_trainable` that reads the module alone."""
    if problem := next(_of_parameters(authored.module), ""):
        raise WorkbenchError(f"{named(authored)}: {problem}")


def named(authored: Authored) -> str:
    """The model's class, and its recipe."""
    kind, recipe = type(authored.module).__name__, authored.recipe
    of = f" of recipe {recipe.name!r}" if recipe is not None and recipe.name != kind else ""
    return f"model {kind}{of}"


class NotCaptured(WorkbenchError):
    """A capture cannot take the model. by_model: the forward itself raised, so that no capture can."""

    by_model = False


def not_captured(authored: Authored, error: Exception) -> NotCaptured:
    """One sentence for what was raised while torch traced: the module, the line, the reason, and what to do."""
    result = NO_TENSOR if without_results(error) else ""
    if kind := unknown_result(error):
        result = (
            f"its forward returns a {kind}, in which torch finds no tensors: return them in tuples, lists, dicts or "
            "dataclasses"
        )
    if result:
        refusal = NotCaptured(f"{named(authored)}: {result}")
        refusal.by_model = True
        return refusal
    line = place(error)
    at = f" at {line}" if line else ""
    if is_users(error):
        refusal = NotCaptured(
            f"{named(authored)}: its forward raised {type(error).__name__}{at}: {reason(error)}"
        )
        refusal.by_model = True
        return refusal
    path = refused_module(authored.module, error)
    where = f"module {path}" if path else "it"
    return NotCaptured(
        f"{named(authored)}: {where} cannot be captured{at}: {type(error).__name__}: {reason(error)}: change that "
        "line, or do it outside of the captured module"
    )


def by_another(
    refusal: NotCaptured, authored: Authored, args: tuple[Any, ...], by: str
) -> str:
    """The refusal, with the name of another capture that takes the model when tried; the forward's own error if any."""
    for name in values_of("capture"):
        if refusal.by_model or name == by:
            continue
        try:
            with hook_of("capture", name)(authored, args, None):
                return f'{refusal}, or try capture "{name}"'
        except NotCaptured as other:
            if other.by_model:
                return str(other)
        except WorkbenchError:
            pass
    return str(refusal)


@contextlib.contextmanager
def refusing_inference_tensors(authored: Authored) -> Iterator[None]:
    """Raise WorkbenchError, with their names, where torch refuses tensors that were made under inference_mode."""
    try:
        yield
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        names = [
            f"{path}.{name}".lstrip(".")
            for path, part in authored.module.named_modules()
            for name, value in (vars(part) | part._buffers).items()
            if isinstance(value, torch.Tensor) and value.is_inference()
        ]
        if torch.is_inference_mode_enabled():
            problem = "its step ran under torch.inference_mode()"
        else:
            problem = f"{few(names, 3) or 'a tensor'} was made under torch.inference_mode(), and no step can save it"
        raise WorkbenchError(
            f"{named(authored)}: {problem}: validate under torch.no_grad() instead"
        ) from error


def _of_parameters(module: nn.Module) -> Iterator[str]:
    parameters = dict(module.named_parameters())
    if not parameters:
        yield "it has no parameters, and so nothing to train: give it an nn.Parameter"
    elif not any(p.requires_grad for p in parameters.values()):
        yield (
            f"all of its parameters are frozen, {next(iter(parameters))} first: call requires_grad_() on those that "
            "are to be trained"
        )


def _of_results(authored: Authored, graph: GraphModule, args: tuple[Any, ...]) -> Iterator[str]:
    results = graph.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    nodes = [node for node in results if isinstance(node, Node)]
    values = [_value(node) for node in nodes]
    kind = kind_of_result(graph, values, args) if values else ""
    if not values:
        yield NO_TENSOR
    elif authored.recipe is not None:
        first, module = values[0], module_path(nodes[0])
        if kind != "tensor" or first.dim() or not first.dtype.is_floating_point:
            where = f", made in module {module}" if module else ""
            yield (f"its forward returns a {kind}: {', '.join(map(described, values))}{where}: return the mean loss "
                   "alone, a real floating-point scalar")
    if values and not any(value.requires_grad for value in values):
        yield (
            "what its forward returns depends on no parameter that requires a gradient: look for detach, no_grad, "
            "argmax, or a cast to integers on its way"
        )


def _of_writes(module: nn.Module, graph: GraphModule, args: tuple[Any, ...]) -> Iterator[str]:
    """Parameters that the forward writes after a gather: the written memory is a copy, and the shards stay as they are.

    Views and detached tensors share their version counter with what they are views of, and `.data` does not.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    inputs = graph.graph.process_inputs(*args)
    for node, source in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if id(source) not in names:
            continue
        todo, shard_keys = list(node.users), {_key(_value(node))}
        while todo:
            read = todo.pop()
            name = (
                read.target
                if isinstance(read.target, str)
                else getattr(read.target, "__name__", "")
            )
            if name not in _READS or not isinstance(value := _value(read), torch.Tensor):
                continue
            todo += read.users
            if node.users and read in node.users:
                shard_keys.add(_key(value))
            elif value._version and _key(value) not in shard_keys:
                yield (
                    f"parameter {names[id(source)]} is written in the forward, where it is a gathered copy, "
                    "and its shards would keep their values: write between the steps, under torch.no_grad()"
                )


_READS = {"to_local", "from_local", "redistribute", "to", "detach", "_get_data_attr"}
"""What lies between a parameter and what its module reads; `.data` too."""


def _key(value: Any) -> Any:
    return storage_key(value.to_local() if isinstance(value, DTensor) else value)


def _value(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))
