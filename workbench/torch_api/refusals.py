"""Why Dynamo or AOTAutograd refused to trace a model: where in the user's code, and torch's reason in one line.

Source: torch/_dynamo/exc.py (`real_stack` holds the traced frames), torch/_dynamo/graph_break_hints.py.
"""

from __future__ import annotations

import re
import traceback
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.export
from torch import nn
from torch.autograd.function import FunctionCtx

from workbench.torch_api.tree import tree_leaves

_HERE = Path(__file__).parents[1]
_NOT_USERS = (
    str(Path(torch.__file__).parent), str(_HERE), str(_HERE.parent / "authoring/simple_fsdp.py")
)
_EXPLAINED = re.compile(r"Explanation: (?:User-inserted graph break\. Message: )?(.+)")
_UNKNOWN_VALUE = re.compile(r"(Could not guard on data-dependent expression [^(\n]*\S)")
_SHARDED = re.compile(r"call_function (cond|while_loop|scan|map_impl)\(.*DTensor\(")
_INNER = re.compile(r"got (\w+\((?P<quote>['\"]).*?(?P=quote)\))", re.DOTALL)


def reason(error: BaseException) -> str:
    """One sentence of a long error: the operator's own error, Dynamo's explanation, or the first line."""
    text = str(error)
    if operator := _SHARDED.search(text):
        return f"torch's {operator[1]} takes no sharded tensor"
    match = _INNER.search(text) or _EXPLAINED.search(text) or _UNKNOWN_VALUE.search(text)
    line = match[1] if match else next(iter(text.splitlines()), "") or type(error).__name__
    first = re.split(r"(?<=[.`]) (?=[A-Z])", " ".join(line.split()))[0]
    return first.rstrip(".").replace(".`", "`")


def place(error: BaseException) -> str:
    """`file.py:12`, the user's innermost line that was traced; "" where torch notes none."""
    # Dynamo's, which may have traced an operator's own code alone, and then Python's
    for frames in (_frames(error), traceback.extract_tb(error.__traceback__)):
        if users := [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]:
            return f"{Path(users[-1].filename).name}:{users[-1].lineno}"
    return ""


def is_users(error: BaseException) -> bool:
    """Whether the model's code raised the error itself, and not torch while it traced that code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not frames[-1].filename.startswith(_NOT_USERS)


def refused_module(module: nn.Module, error: BaseException) -> str:
    """The path of the innermost module whose forward was being traced; of modules of one class the first."""
    path, inner = "", module
    for frame in _frames(error):
        child = next(
            (name for name, part in inner.named_modules() if name and _holds(part, frame)), ""
        )
        if child and frame.name == "forward":
            path, inner = f"{path}.{child}".strip("."), inner.get_submodule(child)
    return path


def _frames(error: BaseException) -> list[Any]:
    return list(getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__))


def _holds(part: nn.Module, frame: Any) -> bool:
    """Whether the frame is one of the module's forward."""
    code = getattr(type(part).forward, "__code__", None)
    return code is not None and code.co_filename == frame.filename and frame.lineno in {
        line for *_, line in code.co_lines()}


def without_results(error: Exception) -> bool:
    """Whether the error means that the module returns no tensor: Dynamo then writes `(,)`, a syntax error."""
    return isinstance(error, SyntaxError) and str(error.filename).startswith("<eval_with_key")


def unknown_result(error: Exception) -> str:
    """The class, if the error means that the module returns an object of a class that is no pytree to torch."""
    match = re.match(r"Found <class '(?:.*\.)?(\w+)'> in output", str(error))
    return match[1] if match else ""


def kind_of_result(graph: Any, values: list[Any], args: tuple[Any, ...]) -> str:
    """The type of the captured module's result: "tensor", or the name of the class that holds its tensors.

    Plain dataclasses in it are registered as torch.export asks: AOTAutograd then looks for the tensors in them.
    """
    # not in every torch
    pack = getattr(graph, "_dynamo_bytecode_unflatten", None)
    result = pack(tuple(values), args) if pack is not None else values[0] if len(values) == 1 else tuple(values)
    while kinds := {type(leaf) for leaf in tree_leaves(result) if is_dataclass(leaf)}:
        for kind in kinds:
            torch.export.register_dataclass(kind)
    return "tensor" if isinstance(result, torch.Tensor) else type(result).__name__


def refusing_none_gradients() -> AbstractContextManager[Any]:
    """Dynamo refuses `ctx.set_materialize_grads(False)` inside: its graph of an autograd.Function leaves that out."""
    return mock.patch.object(FunctionCtx, "set_materialize_grads", _set_materialize_grads)


def _set_materialize_grads(ctx: Any, value: bool) -> None:
    if not value and torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(
            msg="under ctx.set_materialize_grads(False) its backward would get zeros where eager gives it None"
        )
    ctx.materialize_grads = value
