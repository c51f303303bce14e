"""Entry points of AOTAutograd and Dynamo.

Source: torch/_functorch/aot_autograd.py (`aot_export_joint_with_descriptors` and its companion) and
torch/_dynamo/functional_export.py.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
import torch._dynamo.functional_export
import torch.fx.traceback
from torch._dynamo.utils import CleanupHook
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen, _PyTreeCodeGen

from workbench.torch_api.distributed.fake import cached
from workbench.torch_api.flex import cpu_backward
from workbench.torch_api.restoring import same_tensors

Graph = torch.fx.GraphModule


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """The settings of a capture: node metadata is kept, and the fake tensor cache is off.

    The cache would return shared meshes for Dynamo's DTensor inputs.
    """
    with (
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        torch.fx.traceback.preserve_node_meta(),
        mock.patch.object(fake_tensor.log, "disabled", True),  # or it shows the stack of each refusal
        cpu_backward(),
    ):
        yield


def dynamo_capture(
    contexts: contextlib.ExitStack, module: torch.nn.Module, args: tuple[Any, ...]
) -> Graph:
    """The module as one FX graph on its own parameters.

    `meta["tracing_context"]` holds Dynamo's context, `meta["side_effects"]` the sources of the Python objects that the
    forward changes, which the graph leaves out: those of the warning that Dynamo gives for an export.

    The graph can be called until `contexts` closes, which removes the globals that Dynamo's code reads.
    """
    capture: Callable[..., Any] = torch._dynamo.functional_export.dynamo_graph_capture_for_export
    torch._dynamo.reset()
    log_calls = set(filter(callable, vars(logging.Logger).values()))
    # 2.11 would sort these functions to log them, and cannot
    unlogged = mock.patch("torch._dynamo.utils._get_dynamo_config_for_logging", return_value=None)
    with unlogged, torch._dynamo.config.patch(ignore_logging_functions=log_calls), \
            _removed_globals(contexts), _unknown_items(), warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        graph: Graph = capture(module)(*args)
    for name in ("_dynamo_bytecode_flatten", "_dynamo_bytecode_unflatten"):
        if (code := getattr(graph, name, None)) is not None:  # in 2.11 it knows no builtins
            code.f_globals = vars(builtins) | code.f_globals
    graph.meta["side_effects"] = _side_effects(log)
    return graph


@contextlib.contextmanager
def _unknown_items() -> Iterator[None]:
    """Dynamo reads the `item()` of a scalar integer or float64 tensor in host memory, such as a count of steps, as a
    number that it knows, and the partitioner then asks Dynamo to start again, which an export cannot do.

    Source: torch/_subclasses/fake_tensor.py (`FakeTensorConverter.from_real_tensor`), 2.11 to 2.15.
    """
    make = FakeTensorConverter.__init__

    def init_for_export(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options | {"export": True})

    with mock.patch.object(FakeTensorConverter, "__init__", init_for_export):
        yield


_UNDONE = "_dot_output_capturing']._active_collector"
"""transformers sets it for the time of a forward."""
_SIDE_EFFECTS = re.compile(
    r"certain side effects happened in the model\.forward.*?: (\[.*\])", re.DOTALL
)


def _side_effects(log: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """The sources in Dynamo's warning about side effects; all other warnings are shown as they would have been."""
    sources: list[str] = []
    for warning in log:
        match = _SIDE_EFFECTS.search(str(warning.message))
        if match:
            sources += [source for source in ast.literal_eval(match[1]) if not source.endswith(_UNDONE)]
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return tuple(dict.fromkeys(sources))


@contextlib.contextmanager
def _removed_globals(contexts: contextlib.ExitStack) -> Iterator[None]:
    """Let `contexts` remove what Dynamo adds to the traced forward's file, such as `__compiled_fn_1`, with its graphs.

    torch.compile removes them with its code, a capture for export never does. Source: torch/_dynamo/output_graph.py.
    """
    create = CleanupHook.create

    def noted(*args: Any) -> CleanupHook:
        hook = create(*args)
        contexts.callback(_remove_global, hook)
        return hook

    with mock.patch.object(CleanupHook, "create", staticmethod(noted)):
        yield


def _remove_global(hook: CleanupHook) -> None:
    if hook.name in hook.scope:  # Dynamo has removed those of a failed attempt
        hook()


class Contexts(contextlib.ExitStack):
    """An exit stack that records its contexts, so that they can be closed and entered `again`.

    torch needs the contexts of an export until the compilation: its fake mode, no saved-tensor hooks, one autograd
    thread. If they stayed open, tensors made in between, in a notebook's next cell, would be fake.
    """

    def __init__(self) -> None:
        super().__init__()
        self._makers: list[Callable[[], Any]] = []

    def enter_context(self, cm: Any) -> Any:
        self._makers.append(_maker(cm))
        return super().enter_context(cm)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make())
            yield


def _maker(manager: Any) -> Callable[[], Any]:
    """A function that returns the same context again, as a new object where the old one cannot be entered twice."""
    if isinstance(manager, contextlib._GeneratorContextManager):
        # deleted when it is entered
        kind, recipe = (
            type(manager),
            (manager.func, manager.args, manager.kwds),
        )
        return lambda: kind(*recipe)
    if isinstance(manager, torch.autograd.set_multithreading_enabled):
        return manager.clone
    return lambda: manager


def export_joint(
    contexts: Contexts,
    graph: Graph,
    args: tuple[Any, ...],
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> Any:
    """torch's `JointWithDescriptors`. `contexts` gets the contexts that the compilation needs.

    No DTensor reaches the fake mode here, so its cache, which a capture turns off, may be on: a quarter less time.
    """
    context = graph.meta["tracing_context"]
    contexts.enter_context(tracing(context))
    with cached(graph.graph, context.fake_mode), same_tensors(graph):
        return aot_export_joint_with_descriptors(
            contexts, graph, args, decompositions=decompositions
        )


def writes_inputs(export: Any, count: int) -> bool:
    """Whether the exported forward writes into one of the last `count` inputs in place: the batch."""
    inputs = export._aot_state.fw_metadata.input_info
    return any(info.mutates_data for info in inputs[len(inputs) - count:])


@contextlib.contextmanager
def pass_context(context: TracingContext) -> Iterator[None]:
    """The tracing state around a pass or a compiler that works on a graph after its capture."""
    with tracing(context), torch.no_grad(), torch._C._DisableAutocast():
        yield


class LateBound:
    """The result of a compiler callback, with a body that is set after torch has returned.

    It keeps the graph, its example inputs, and the tracing state that compilers expect. Boxed: it takes one list, which
    the body may empty.
    """

    _boxed_call = True

    def __init__(self, graph: Graph, example_inputs: list[Any]):
        self.graph, self.example_inputs = graph, list(example_inputs)
        self.tracing_context = TracingContext.get()
        self.fw_metadata = self.tracing_context.fw_metadata
        self.body: Callable[[list[Any]], Any] | None = None

    def __call__(self, args: list[Any]) -> Any:
        if self.body is None:
            raise RuntimeError("this graph has no body yet: call compile_step() first")
        return self.body(args)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The tracing state around a pass or a compiler that works on the graph after the capture."""
        self.tracing_context.fw_metadata = self.fw_metadata
        with pass_context(self.tracing_context):
            yield


def parameter_of(node: torch.fx.Node) -> str | None:
    """The qualified name of the parameter or buffer that this placeholder is, or is a component of."""
    return _named(node.meta.get("desc"))


def gradient_of(desc: Any) -> str | None:
    """The qualified name of the parameter whose gradient, or a component of it, has this output descriptor."""
    return _named(getattr(_whole(desc), "grad_of", None))


def written_by(desc: Any) -> str | None:
    """The qualified name of the parameter or buffer whose new value has this output descriptor."""
    return _named(getattr(_whole(desc), "mutated_input", None))


def _whole(desc: Any) -> Any:
    """The descriptor of the tensor that `desc` describes a component of, such as a DTensor's local tensor."""
    while isinstance(
        base := getattr(desc, "base", None), descriptors.AOTInput | descriptors.AOTOutput
    ):
        desc = base
    return desc


def _named(desc: Any) -> str | None:
    desc = _whole(desc)
    return (
        desc.target
        if isinstance(desc, descriptors.ParamAOTInput | descriptors.BufferAOTInput)
        else None
    )


def is_parameter(node: torch.fx.Node) -> bool:
    """Whether a placeholder is a parameter, or a tensor component of one."""
    desc = node.meta.get("desc")
    return desc is not None and desc.is_param() and isinstance(node.meta.get("val"), torch.Tensor)


def is_state(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a whole step is the optimizer's: a state, the step count or the learning rate."""
    return node.op == "placeholder" and "desc" not in node.meta


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder is a tangent, or a component of one."""
    return (desc := node.meta.get("desc")) is not None and desc.is_tangent()


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that `function` accepts in this torch version; each release adds some."""
    known = inspect.signature(function).parameters
    return {k: v for k, v in keywords.items() if k in known}


def boxed(graph: Graph) -> Callable[[list[Any]], Any]:
    """A callable of one list, which it empties, so that each input is freed after its last use."""
    copy = clone(graph)
    copy.graph.set_codegen(_BoxedCodeGen())
    copy.recompile()
    return copy.forward


def clone(graph: Graph) -> Graph:
    """A copy that shares no node with `graph`, and keeps names, metadata entries and the calling convention.

    It copies node by node like `Graph.create_node`, without the checks that the nodes have passed: half the time.
    """
    old = graph.graph
    new = torch.fx.Graph()
    names, known = new._graph_namespace, old._graph_namespace
    names._used_names, names._base_count = set(known._used_names), dict(known._base_count)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in old.nodes:
        args, kwargs = (
            torch.fx.node.map_arg(a, copies.__getitem__) for a in (node.args, node.kwargs)
        )
        copies[node] = put(new, node, node.name, args, kwargs, dict(node.meta))
    return like(graph, new)


def put(
    graph: torch.fx.Graph, old: torch.fx.Node, name: str, args: Any, kwargs: Any, meta: Any
) -> torch.fx.Node:
    """Append a node with the operator of `old` to `graph`, without the checks that `old` has passed.

    name: unused in `graph`, or reserved by it.
    """
    node = torch.fx.Node(graph, name, old.op, old.target, args, kwargs, old.type)
    node.meta = meta
    graph._graph_namespace._used_names.add(name)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def convention_of(graph: Graph) -> Any:
    """How a graph is called, for `set_convention`: with two lists, or with an argument for each input."""
    return graph.graph._codegen


def called_with(graph: Graph) -> str:
    """The inputs of a call of the graph, in words."""
    codegen = graph.graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        return f"a tree of {len(codegen.pytree_info.orig_args)} inputs"
    return "one list" if isinstance(codegen, _BoxedCodeGen) else "an argument for each input"


def set_convention(graph: Graph, convention: Any) -> None:
    """Write the graph's code again, in this convention."""
    graph.graph.set_codegen(convention)
    graph.recompile()


def like(graph: Graph, new: torch.fx.Graph, attributes: dict[str, Any] | None = None) -> Graph:
    """A module of the graph `new`, with the calling convention, metadata and attributes of `graph`, or these."""
    new.set_codegen(graph.graph._codegen)
    root = graph if attributes is None else attributes
    module = _LazyGraphModule(root, new)  # type: ignore[arg-type]  # writes its code when that is first needed
    module.meta = dict(graph.meta)
    return module
