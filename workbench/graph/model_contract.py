"""The conditions under which a model's training step can be captured, checked between Dynamo and AOTAutograd."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from workbench.authoring.author import Authored
from workbench.errors import WorkbenchError
from workbench.recipe.wording import counted
from workbench.torch_api import aot
from workbench.torch_api.module_paths import module_path
from workbench.torch_api.ops import calls_of, draws, may_draw, storage_key
from workbench.torch_api.tracing.refusals import place, reason, refused_module, without_backward

NO_TENSOR = "its forward returns no tensor: return the mean loss, a scalar tensor"


def require_trainable(authored: Authored, graph: GraphModule, args: tuple[Any, ...]) -> None:
    """Raise WorkbenchError, with the model, the parameter or module, and the remedy, for a model that cannot train.

    graph: Dynamo's graph of `authored.module`, called with `args`. A recipe's model must return one scalar loss. A
    module without a recipe may return anything that its caller can call `backward` on.
    """
    problems = chain(_of_parameters(authored.module), _of_results(authored, graph, args), _of_norms(graph),
                     _of_operators(graph), _of_side_effects(graph), _of_writes(authored.module, graph),
                     _of_checkpoints(authored.module, graph))
    if problem := next(problems, ""):
        raise WorkbenchError(f"{named(authored)}: {problem}")


def require_parameters(authored: Authored) -> None:
    """The part of `require_trainable` that reads the module alone."""
    if problem := next(_of_parameters(authored.module), ""):
        raise WorkbenchError(f"{named(authored)}: {problem}")


def require_one_draw(authored: Authored, graph: GraphModule, joint: GraphModule) -> None:
    """Raise WorkbenchError for a checkpoint that draws other random numbers when its backward runs it again.

    graph: Dynamo's. joint: AOTAutograd's of it, which draws once.
    """
    if not any(draws(node) and "recompute" in node.meta for node in calls_of(joint.graph, may_draw)):
        return
    for node in _checkpoints(graph):
        if node.kwargs.get("preserve_rng_state") is False:
            raise WorkbenchError(f"{named(authored)}: {_module(node, 'it')} draws random numbers in a checkpoint with "
                                 "preserve_rng_state=False, which draws others in the backward, and the compiled step "
                                 "would not: leave that argument out")


def named(authored: Authored) -> str:
    """The model's class, and its recipe."""
    of = f" of recipe {authored.recipe.name!r}" if authored.recipe is not None else ""
    return f"model {type(authored.module).__name__}{of}"


_NO_BACKWARD = "operator {}, which has no backward: write one with torch.library.register_autograd"
_REMEDIES = {
    r"mixed torch.Tensor and DTensor": (
        "it reads a sharded parameter outside of the module that holds it: call that module, or give it no style in "
        "the plan"),
    r"data-dependent|Data-dependent": (
        "what it does next depends on a tensor's value: choose with torch.where, or decide outside of the forward"),
    r"RNN, GRU, or LSTM": (
        "Dynamo does not trace RNN, GRU and LSTM: write the recurrence as a loop over nn.LSTMCell or nn.GRUCell"),
    r"Module-level backwards hooks": (
        "a module has a hook on its gradient: take the hook off, or write it as a torch.autograd.Function"),
    r"Random\.|random\.|RandomState": (
        "it draws random numbers of Python or NumPy: draw them with torch, as torch.rand does"),
    r"are_deterministic_algorithms": (
        "it asks whether torch's algorithms are deterministic, which a capture sets: ask before the capture"),
    r"function `manual_seed`|Generator.manual_seed|initial_seed": (
        "it reads or sets the seed of torch's generator: do it between the steps"),
    r"share storage but are not": (
        "it writes into a buffer that shares memory with another: give each memory of its own with .clone()"),
    r"expected to have an entirely functional graph": (
        "it writes into a tensor that is no buffer: give it to register_buffer"),
    r"convert all Tensors to FakeTensors": "it reads a tensor that is no buffer: give it to register_buffer",
    r"has been modified inplace": (
        "it writes into a parameter: write between the steps, and build an embedding without max_norm"),
    r"No module named 'triton'": "it calls a Triton kernel, and Triton is not installed: torch for GPUs brings it",
    r"no fake impl registered for <CustomOpDef\(([\w:]+)\)>|unsupported operator: (\w+)\.(\w+)": (
        "operator {} has no fake, which gives the shape of its result: write one with torch.library.register_fake"),
    r"backward through (\w+)\.(\w+)\.\w+ but no autograd formula": _NO_BACKWARD,
    r"Function GeneratedBackwardFor_(\w+)_defaultBackward returned an invalid gradient": (
        "the gradient of operator {} has another shape than its input: give its fake the shape of its result, and its "
        "backward that of its input"),
}
_OTHERWISE = "change that line, or do it outside of the captured module"


def not_captured(authored: Authored, error: Exception, *, by: str = "joint") -> str:
    """One sentence for what torch raised while it traced: the module, the line, why, and the remedy. by: the capture,
    whose other may take what no rule here explains.
    """
    path, line, text = refused_module(authored.module, error), place(error), str(error)
    where = f"module {path}" if path else "it"
    why = next((told.format("::".join(filter(None, found.groups())))
                for pattern, told in _REMEDIES.items() if (found := re.search(pattern, text))), "")
    other = ', or set capture to "joint"' if by == "traced" else ', or try capture "traced"' if not why else ""
    return (f"{named(authored)}: {where} cannot be captured{f' at {line}' if line else ''}: "
            + (why or f"{type(error).__name__}: {reason(error)}: {_OTHERWISE}") + other)


def _of_parameters(module: nn.Module) -> Iterator[str]:
    parameters = dict(module.named_parameters())
    if not parameters:
        yield "it has no parameters, and so nothing to train: give it an nn.Parameter"
    elif not any(p.requires_grad for p in parameters.values()):
        yield (f"all of its parameters are frozen, {next(iter(parameters))} first: call requires_grad_() on those that "
               "are to be trained")
    for name, parameter in parameters.items():
        if parameter.dtype.is_complex:
            yield (f"parameter {name} is {_short(parameter.dtype)}, and shards and gradients are real: store it as a "
                   "real parameter of shape (..., 2), and read it through torch.view_as_complex")
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            where = f"module {path} ({type(part).__name__})" if path else "it"
            yield (f"{where} makes sparse gradients, which can be neither captured nor reduced over ranks: build it "
                   "with sparse=False")


def _of_results(authored: Authored, graph: GraphModule, args: tuple[Any, ...]) -> Iterator[str]:
    results = graph.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    values = [(node, _value(node)) for node in results if isinstance(node, Node)]
    if not values:
        yield NO_TENSOR
    elif authored.recipe is not None and (kind := aot.kind_of_result(graph, [v for _, v in values], args)) != "tensor":
        shapes = ", ".join(str(list(value.shape)) for _, value in values)
        yield (f"its forward returns a {kind} of {counted(len(values), 'tensor')}, of shapes {shapes}: return the mean "
               "loss alone, a scalar tensor")
    for node, value in values[:1] if authored.recipe is not None else ():
        if value.dim() or not value.dtype.is_floating_point:
            made = f", made in module {module_path(node)}" if module_path(node) else ""
            what = f"a tensor of shape {list(value.shape)}" if value.dim() else f"a scalar in {_short(value.dtype)}"
            yield f"its forward returns {what}{made}: return the mean loss, a real floating-point scalar"
    if values and not any(value.requires_grad for _, value in values):
        yield ("what its forward returns depends on no parameter that requires a gradient: look for detach, no_grad, "
               "argmax, or a cast to integers on its way")


def _of_norms(graph: GraphModule) -> Iterator[str]:
    """When traced, batch norm keeps the strides of its input. Its kernels return a result in a memory format."""
    for node in graph.graph.find_nodes(op="call_function", target=nn.functional.batch_norm):
        given = _value(node.args[0] if node.args else node.kwargs["input"])
        formats = [torch.contiguous_format, *_CHANNELS_LAST.get(given.dim(), ())]
        if not any(given.is_contiguous(memory_format=each) for each in formats):
            yield (f"the input of {_module(node, 'a batch norm')} is not contiguous (shape {list(given.shape)}, "
                   f"strides {list(given.stride())}), so its output would be captured with wrong strides: call "
                   ".contiguous() on what goes into it")


def _of_operators(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and (operator := without_backward(node)):
            yield f"{_module(node, 'it')} calls " + _NO_BACKWARD.format(operator)


def _of_side_effects(graph: GraphModule) -> Iterator[str]:
    """What the forward does in Python, and the compiled step would not do."""
    for effect in graph.meta["side_effects"]:
        yield f"{f'module {effect.module}' if effect.module else 'it'} {_EFFECTS[effect.kind].format(effect.name)}"


_IN_PLACE = "write into it in place, with copy_, add_ or lerp_"
_EFFECTS = {
    "buffer": f"assigns its buffer {{!r}} in its forward, which the compiled step would not do: {_IN_PLACE}",
    "attribute": ("assigns its attribute {!r} in its forward, which the compiled step would not do: make it a buffer, "
                  f"and {_IN_PLACE}"),
    "contents": ("changes what its attribute {!r} holds in its forward, which the compiled step would not do: return "
                 f"the new value, or make it a buffer, and {_IN_PLACE}"),
    "outside": ("changes {!r}, which lies outside of the module, in its forward, which the compiled step would not do: "
                f"return the new value, or make it a buffer, and {_IN_PLACE}"),
    "on tensor": ("assigns attribute {!r} of a tensor in its forward, which the compiled step would not do: make it a "
                  "buffer, and " + _IN_PLACE),
    "tensor": ("reads a tensor's {!r} in its forward, which the compiled step would not do: read it between the "
               "steps"),
    "setting": ("leaves torch's setting {!r} changed after its forward, which the compiled step would not do: change "
                "it before the capture"),
}


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
            name = read.target if isinstance(read.target, str) else getattr(read.target, "__name__", "")
            if name not in _READS or not isinstance(value := _value(read), torch.Tensor):
                continue
            todo += read.users
            if node.users and read in node.users:
                own.add(_key(value))
            elif value._version and _key(value) not in own:
                yield (f"parameter {names[str(node.target)]} is written in the forward, where it is a gathered copy, "
                       "and its shards would keep their values: write between the steps, under torch.no_grad()")


def _of_checkpoints(module: nn.Module, graph: GraphModule) -> Iterator[str]:
    """Buffers that a checkpoint reads and the forward writes: eager PyTorch runs the checkpoint a second time."""
    names = {_as_input(name, "buffers"): name for name, _ in module.named_buffers(remove_duplicate=False)}
    for node in _checkpoints(graph):
        for given in node.all_input_nodes:
            if (name := names.get(str(given.target))) and _value(given)._version:
                yield (f"{_module(node, 'it')} reads buffer {name} inside of a checkpoint, and its forward writes it: "
                       "the backward would read or write it a second time: leave the buffer out of the checkpoint")


def _checkpoints(graph: GraphModule) -> Iterator[Node]:
    return (node for node in graph.graph.nodes if str(node.target).endswith("activation_checkpoint"))


_READS = {"to_local", "from_local", "redistribute", "to", "detach", "_get_data_attr"}
"""What lies between a parameter and what its module reads; `.data` too."""


def _as_input(name: str, kind: str = "parameters") -> str:
    """What Dynamo calls the placeholder of a parameter, or of a buffer."""
    *path, own = name.split(".")
    return "L_self_" + "".join(f"modules_{part}_" for part in path) + f"{kind}_{own}_"


def _key(value: Any) -> Any:
    return storage_key(value.to_local() if isinstance(value, DTensor) else value)


_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def _module(node: Node, otherwise: str) -> str:
    path = module_path(node)
    return f"module {path}" if path else otherwise


def _value(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
