"""The conditions under which a model's training step can be captured, checked between Dynamo and AOTAutograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from workbench.authoring.authored import Authored
from workbench.authoring.plans import AuthoringError
from workbench.errors import WorkbenchError
from workbench.recipe.hooks import values_of
from workbench.recipe.wording import counted
from workbench.torch_api import aot
from workbench.torch_api.module_paths import module_path
from workbench.torch_api.ops import storage_key
from workbench.torch_api.tracing.refusals import place, reason, refused_module

MOST_PADDED = 20_000
"""The most pieces that a capture may pad. Measured: ten thousand take half a minute and 250 MB."""
NO_TENSOR = "its forward returns no tensor: return the mean loss, a scalar tensor"


def require_trainable(authored: Authored, graph: GraphModule, args: tuple[Any, ...]) -> None:
    """Raise WorkbenchError, with the model, the parameter or module, and the remedy, for a model that cannot train.

    graph: Dynamo's graph of `authored.module`, called with `args`. A recipe's model must return one scalar loss. A
    module without a recipe may return anything that its caller can call `backward` on.
    """
    module = authored.module
    problems = chain(
        _of_parameters(module), _of_results(authored, graph, args), _of_writes(module, graph)
    )
    if problem := next(problems, ""):
        raise WorkbenchError(f"{named(authored)}: {problem}")


def require_parameters(authored: Authored) -> None:
    """The part of `require_trainable` that reads the module alone."""
    if problem := next(_of_parameters(authored.module), ""):
        raise WorkbenchError(f"{named(authored)}: {problem}")


def named(authored: Authored) -> str:
    """The model's class, and its recipe."""
    of = f" of recipe {authored.recipe.name!r}" if authored.recipe is not None else ""
    return f"model {type(authored.module).__name__}{of}"


def not_captured(authored: Authored, error: Exception, *, by: str = "joint") -> str:
    """One sentence for what torch raised while it traced: the module, the line, torch's reason, and what to do.

    by: the capture; another may take the model.
    """
    path, line = refused_module(authored.module, error), place(error)
    where = f"module {path}" if path else "it"
    at = f" at {line}" if line else ""
    others = [f'or try capture "{name}"' for name in values_of("capture") if name != by]
    return (
        f"{named(authored)}: {where} cannot be captured{at}: {type(error).__name__}: {reason(error)}: change that "
        + ", ".join(["line", "or do it outside of the captured module", *others])
    )


def _of_parameters(module: nn.Module) -> Iterator[str]:
    parameters = dict(module.named_parameters())
    if not parameters:
        yield "it has no parameters, and so nothing to train: give it an nn.Parameter"
    elif not any(p.requires_grad for p in parameters.values()):
        yield (
            f"all of its parameters are frozen, {next(iter(parameters))} first: call requires_grad_() on those that "
            "are to be trained"
        )
    for name, parameter in parameters.items():
        if parameter.dtype.is_complex:
            yield (
                f"parameter {name} is {_short(parameter.dtype)}, and shards and gradients are real: store it as a "
                "real parameter of shape (..., 2), and read it through torch.view_as_complex"
            )
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            where = f"module {path} ({type(part).__name__})" if path else "it"
            yield (
                f"{where} makes sparse gradients, which can be neither captured nor reduced over ranks: build it "
                "with sparse=False"
            )


def _of_results(authored: Authored, graph: GraphModule, args: tuple[Any, ...]) -> Iterator[str]:
    results = graph.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    values = [(node, _value(node)) for node in results if isinstance(node, Node)]
    if not values:
        yield NO_TENSOR
    elif (
        authored.recipe is not None
        and (kind := aot.kind_of_result(graph, [v for _, v in values], args)) != "tensor"
    ):
        shapes = ", ".join(str(list(value.shape)) for _, value in values)
        yield (
            f"its forward returns a {kind} of {counted(len(values), 'tensor')}, of shapes {shapes}: return the mean "
            "loss alone, a scalar tensor"
        )
    for node, value in values[:1] if authored.recipe is not None else ():
        if value.dim() or not value.dtype.is_floating_point:
            made = f", made in module {module_path(node)}" if module_path(node) else ""
            what = (
                f"a tensor of shape {list(value.shape)}"
                if value.dim()
                else f"a scalar in {_short(value.dtype)}"
            )
            yield f"its forward returns {what}{made}: return the mean loss, a real floating-point scalar"
    if values and not any(value.requires_grad for _, value in values):
        yield (
            "what its forward returns depends on no parameter that requires a gradient: look for detach, no_grad, "
            "argmax, or a cast to integers on its way"
        )


def _of_writes(module: nn.Module, graph: GraphModule) -> Iterator[str]:
    """Parameters that the forward writes after a gather: the written memory is a copy, and the shards stay as they are.

    Views and detached tensors share their version counter with what they are views of, and `.data` does not.
    """
    names = {_as_input(name): name for name, _ in module.named_parameters(remove_duplicate=False)}
    for node in graph.graph.find_nodes(op="placeholder"):
        if str(node.target) not in names:
            continue
        todo, own = list(node.users), {_key(_value(node))}
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
                own.add(_key(value))
            elif value._version and _key(value) not in own:
                yield (
                    f"parameter {names[str(node.target)]} is written in the forward, where it is a gathered copy, "
                    "and its shards would keep their values: write between the steps, under torch.no_grad()"
                )


_READS = {"to_local", "from_local", "redistribute", "to", "detach", "_get_data_attr"}
"""What lies between a parameter and what its module reads; `.data` too."""


def _as_input(name: str) -> str:
    """What Dynamo calls the placeholder of a parameter."""
    *path, own = name.split(".")
    return "L_self_" + "".join(f"modules_{part}_" for part in path) + f"parameters_{own}_"


def _key(value: Any) -> Any:
    return storage_key(value.to_local() if isinstance(value, DTensor) else value)


def _value(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_padding(module: nn.Module) -> None:
    """AuthoringError where so many ranks hold an uneven part of a parameter that a capture would take too long.

    Where an axis does not divide a dim, DTensor adds operators that pad each smaller piece.
    """
    padded: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            for axis, parts, placement in zip(
                param.device_mesh.mesh_dim_names or (),
                param.device_mesh.shape,
                param.placements,
                strict=True,
            ):
                size = 0 if placement.is_replicate() else param.shape[placement.dim]  # type: ignore[attr-defined]
                if size % parts:
                    pieces = parts - size // -(-size // parts)
                    padded.setdefault((axis, parts), []).append((pieces, f"{name} has {size}"))
    count = sum(pieces for found in padded.values() for pieces, _ in found)
    if count > MOST_PADDED:
        (axis, parts), found = max(
            padded.items(), key=lambda item: sum(pieces for pieces, _ in item[1])
        )
        raise AuthoringError(
            f"mesh axis {axis} of {parts:,} ranks does not divide the rows of {len(found)} parameters "
            f"({max(found)[1]}): torch pads the pieces one by one, {count:,} of them, and a capture takes "
            f"{MOST_PADDED:,} at most: make the axis smaller, or take sizes that it divides"
        )
