"""The user's own code in a trace: what it asks of torch, what it draws, and which global variables it reads.

Source: torch/_dynamo/variables/torch.py (`tracing_state_functions` and its handler), torch/random.py,
torch/_dynamo/variables/user_defined.py (`call_random_fn`), torch/_subclasses/fake_tensor.py
(`FakeTensorConverter.from_real_tensor`).
"""

from __future__ import annotations

import contextlib
import dis
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch._dynamo.config
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TensorVariable, misc, user_defined
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import FakeTensorConverter

from workbench.errors import is_library

_SOURCES = (os.path.dirname(torch.__file__), str(Path(__file__).parents[2]))  # which may be checkouts
_DRAW = "_call_random" if hasattr(misc.RandomVariable, "_call_random") else "call_method"  # by torch version
_IS_TRACED = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting,
              torch._dynamo.external_utils.is_compiling, torch._utils.is_compiling)
_DETERMINISTIC = torch.are_deterministic_algorithms_enabled
_ASKS = "it asks whether torch's algorithms are deterministic, which a capture sets: ask before the capture"
LEAF = ("is_leaf", "grad_fn")
"""What autograd knows of a weight, and of a gathered one otherwise."""
_GATHERS = ("to_local", "from_local", "redistribute", "to")
_SEEDED = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng")


def is_own(file: str) -> bool:
    """Whether a source file is the user's: not of Python, torch, this package, or another installed one."""
    return not is_library(file) and not file.startswith(_SOURCES)


@contextlib.contextmanager
def nothing_frozen() -> Iterator[None]:
    """Inside, Dynamo finds no value that would stay what it is at the capture, and answers the user's code as eager.

    Dynamo knows the `item()` of a scalar integer or float64 tensor in host memory, such as a buffer that counts the
    steps: here it does not, and a branch on one depends on a tensor's value. A number of Python's or NumPy's
    own generator is refused, and so is a draw of a generator that outlives the step. `is_compiling` and its kin are
    False. An installed package gets torch's True: it asks in order to leave out what cannot be traced.
    """
    make, call = FakeTensorConverter.__init__, TorchInGraphFunctionVariable.call_function
    instance: Callable[..., Any] = BuiltinVariable.call_isinstance
    draw: Callable[..., Any] = getattr(misc.RandomVariable, _DRAW)

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options | {"export": True})

    def drawn(self: Any, tx: Any, name: str, *given: Any) -> Any:
        return _refuse(tx, name) if self.source is not None else draw(self, tx, name, *given)

    def answered(self: Any, tx: Any, *given: Any, **named: Any) -> Any:
        if is_own(tx.f_code.co_filename):
            if any(self.value is asked for asked in _IS_TRACED):
                return ConstantVariable.create(False)
            if self.value is _DETERMINISTIC:
                raise Unsupported(_DETERMINISTIC.__name__)
        return call(self, tx, *given, **named)

    def is_instance(self: Any, tx: Any, value: Any, kinds: Any) -> Any:
        if is_weight(value) and issubclass(nn.Parameter, kinds.as_python_constant()):
            return ConstantVariable.create(True)  # a sharded weight is gathered first, and then no parameter
        return instance(self, tx, value, kinds)

    with (mock.patch.object(FakeTensorConverter, "__init__", made),
          mock.patch.object(BuiltinVariable, "call_isinstance", is_instance),
          mock.patch.object(user_defined, "call_random_fn", _refuse),
          mock.patch.object(misc.RandomVariable, _DRAW, drawn),
          mock.patch.object(TorchInGraphFunctionVariable, "call_function", answered),
          torch._dynamo.config.patch(use_numpy_random_stream=True)):
        yield


def _refuse(tx: Any, drawn: Any, *given: Any) -> NoReturn:
    raise Unsupported(f"random.{getattr(drawn, '__name__', drawn)}")


def is_weight(value: Any) -> bool:
    """Whether Dynamo's variable is a sharded weight that is gathered, and so no leaf of autograd."""
    node = value.as_proxy().node if isinstance(value, TensorVariable) else None
    if node is None or node.op == "placeholder":
        return False
    while node.all_input_nodes and getattr(node.target, "__name__", node.target) in _GATHERS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and "_parameters_" in str(node.target)


@contextlib.contextmanager
def refused_calls(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, the user's code may not seed or read torch's generators, nor ask for the setting of the capture.

    refuse: makes the error of a reason and its remedy.
    """
    def guarded(function: Callable[..., Any], why: str) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            if is_own(sys._getframe(1).f_code.co_filename):
                raise refuse(why)
            return function(*given, **named)

        return called

    with contextlib.ExitStack() as stack:
        for name in _SEEDED:
            why = f"it calls torch's {name} in its forward, which a traced step would not do: call it between the steps"
            for place in filter(lambda place: hasattr(place, name), (torch, torch.random)):
                stack.enter_context(mock.patch.object(place, name, guarded(getattr(place, name), why)))
        stack.enter_context(mock.patch.object(torch, _DETERMINISTIC.__name__, guarded(_DETERMINISTIC, _ASKS)))
        yield


def global_sources(module: nn.Module) -> Iterator[str]:
    """Sources of the global variables in the code of the module's forwards, and of the functions that these name.

    Read from the code, so also of what does not run. Left out are functions that are found in another way, such as in
    a list.
    """
    todo: list[tuple[Any, Any]] = []  # a function, and the module that it is a method of
    for each in module.modules():
        todo += [(type(each).forward, each), *((value, each) for value in vars(each).values())]
    known: set[tuple[CodeType, type]] = set()
    while todo:
        function, part = todo.pop()
        if not isinstance(function, FunctionType) or (function.__code__, type(part)) in known:
            continue
        known.add((function.__code__, type(part)))
        if not is_own(function.__code__.co_filename):
            continue
        home, scope = function.__globals__.get("__name__"), function.__globals__
        for code in _codes(function.__code__):
            for chain in _chains(code):
                value: Any = scope.get(chain[0])
                for i, name in enumerate(chain):
                    value = _held(value, name) if i else value
                    yield f"M['{home}'].{'.'.join(chain[:i + 1])}"
                    yield from inside(f"M['{home}'].{'.'.join(chain[:i + 1])}", value)
                    todo += [(value, None), *((method, None) for method in vars(type(value)).values())]
            if {"environ", "getenv"} & {*code.co_names}:
                yield from (f"M['os'].environ._data[{name.encode()!r}]" for name in code.co_consts
                            if isinstance(name, str) and name.isidentifier())
            todo += [(getattr(type(part), name, None), part) for name in code.co_names]
        todo += [(cell.cell_contents, part) for cell in function.__closure__ or ()]


def inside(source: str, value: Any) -> Iterator[str]:
    """The sources of what a value holds: an object's attributes, a weak reference's object, a function's closure."""
    if isinstance(value, torch.Tensor | nn.Module | ModuleType | type):
        return
    yield f"{source}.*"
    if isinstance(value, FunctionType):
        yield f"{source}.__defaults__"
        yield from (f"{source}.__closure__[{i}].cell_contents" for i in range(len(value.__closure__ or ())))
    elif isinstance(value, MethodType):
        yield from inside(f"{source}.__self__", value.__self__)
    elif isinstance(value, weakref.ref):
        yield from inside(f"{source}()", value())
    else:
        names = {**vars(type(value)), **getattr(value, "__dict__", {})} if hasattr(value, "__dict__") else {}
        yield from (f"{source}.{name}" for name, held in names.items() if name[:1] != "_" and not callable(held))


def _held(value: Any, name: str) -> Any:
    """What an object, a class or a Python module holds by this name, without running a property; None if nothing."""
    return getattr(value, "__dict__", {}).get(name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _chains(code: CodeType) -> Iterator[list[str]]:
    """`["config", "scale"]` for `config.scale`, where `config` is global."""
    chain: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            if chain:
                yield chain
            chain = [str(step.argval)]
        elif chain and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(str(step.argval))
        elif step.opname != "CACHE" and chain:
            yield chain
            chain = []
