"""AOTAutograd and Dynamo entry points that torch keeps private.

Source: torch/_functorch/aot_autograd.py (`aot_export_joint_with_descriptors` and its companion) and
torch/_dynamo/functional_export.py.
"""

from __future__ import annotations

import contextlib
import copy
import enum
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
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen

from workbench.torch_api.distributed.fake import cached
from workbench.torch_api.flex import cpu_backward
from workbench.torch_api.side_effects import noted_side_effects

Graph = torch.fx.GraphModule


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """The settings a faithful capture needs.

    The fake tensor cache returns shared meshes for Dynamo's DTensor inputs, and node metadata is dropped unless asked
    for.
    """
    with (torch._dynamo.config.patch(fake_tensor_cache_enabled=False), torch.fx.traceback.preserve_node_meta(),
          cpu_backward()):
        yield


def dynamo_capture(contexts: contextlib.ExitStack, module: torch.nn.Module, args: tuple[Any, ...]) -> Graph:
    """The module as one FX graph over its own parameters; `meta["tracing_context"]` holds Dynamo's context, and
    `meta["side_effects"]` what the graph leaves out.

    The graph can be called until `contexts` closes, which removes the globals that Dynamo's code reads.
    """
    capture: Callable[..., Any] = torch._dynamo.functional_export.dynamo_graph_capture_for_export
    torch._dynamo.reset()
    with _noted_globals() as hooks, noted_side_effects() as effects:
        contexts.callback(_remove_globals, hooks)
        graph: Graph = capture(module)(*args)
    graph.meta["side_effects"] = effects
    return graph


@contextlib.contextmanager
def _noted_globals() -> Iterator[list[CleanupHook]]:
    """The globals that Dynamo gives the file of the traced forward, such as `__compiled_fn_1`, with graph and guards.

    torch.compile removes them with its code; a capture for export never does. Source: torch/_dynamo/output_graph.py
    `install_global_unsafe`.
    """
    hooks: list[CleanupHook] = []
    create = CleanupHook.create

    def noted(*args: Any) -> CleanupHook:
        hooks.append(create(*args))
        return hooks[-1]

    with mock.patch.object(CleanupHook, "create", staticmethod(noted)):
        yield hooks


def _remove_globals(hooks: list[CleanupHook]) -> None:
    for hook in hooks:
        if hook.name in hook.scope:  # Dynamo itself removes those of an attempt that failed
            hook()


def without_results(error: Exception) -> bool:
    """Whether Dynamo raised this of a module that returns no tensor: it writes `(,)`, which Python does not read."""
    return isinstance(error, SyntaxError) and str(error.filename).startswith("<eval_with_key")


def kind_of_result(graph: Graph, values: list[Any], args: tuple[Any, ...]) -> str:
    """What the module that Dynamo captured returns: "tensor", or the name of the class that holds its tensors."""
    pack: Callable[..., Any] | None = getattr(graph, "_dynamo_bytecode_unflatten", None)  # torch may lack it
    result = pack(tuple(values), args) if pack is not None else values[0] if len(values) == 1 else tuple(values)
    return "tensor" if isinstance(result, torch.Tensor) else type(result).__name__


class Contexts(contextlib.ExitStack):
    """An exit stack that remembers what was entered, so that it can be closed and entered `again`.

    torch wants the contexts of an export kept until the compile: its fake mode, no saved-tensor hooks, one autograd
    thread. Left open they would turn every tensor that is made in between, in a notebook's next cell, into a fake one.
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
    """What gives the same context once more: one made by a generator, or that acts when made, is made anew."""
    if isinstance(manager, contextlib._GeneratorContextManager):
        kind, recipe = type(manager), (manager.func, manager.args, manager.kwds)  # gone once it is entered
        return lambda: kind(*recipe)
    if isinstance(manager, torch.autograd.set_multithreading_enabled):
        return manager.clone
    return lambda: manager


def export_joint(
    contexts: Contexts, graph: Graph, args: tuple[Any, ...], decompositions: dict[Any, Callable[..., Any]] | None
) -> Any:
    """torch's `JointWithDescriptors`; `contexts` holds what compiling needs.

    No DTensor goes through the fake mode here, so its cache, which Dynamo's mode has off, serves: a quarter less time.
    """
    context = graph.meta["tracing_context"]
    contexts.enter_context(tracing(context))
    with cached(graph.graph, context.fake_mode):
        return aot_export_joint_with_descriptors(contexts, graph, args, decompositions=decompositions)


def fork_joint(export: Any) -> Any:
    """A `JointWithDescriptors` on the same graph that can be compiled without using `export` up.

    Compiling writes into torch's records of the capture: which inputs are subclasses, what is saved, the wrappers.
    Those are copied; graphs, tensors and descriptors are shared. `export` must not have been compiled itself.
    """
    return _forked(export, {})


_RECORDS = "torch._functorch._aot_autograd"


def _forked(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:
        return made[id(value)]
    if type(value) in (list, tuple):
        copied = made[id(value)] = type(value)([_forked(v, made) for v in value])
        return copied
    if type(value) is dict:
        copied = made[id(value)] = {k: _forked(v, made) for k, v in value.items()}
        return copied
    kind = type(value)
    ours = kind.__module__.startswith(_RECORDS) and kind.__module__ != descriptors.__name__
    if not ours or isinstance(value, enum.Enum) or not hasattr(value, "__dict__") or callable(value):
        return value
    copied = made[id(value)] = copy.copy(value)
    for name, held in vars(value).items():
        object.__setattr__(copied, name, _forked(held, made))  # some are frozen
    return copied


@contextlib.contextmanager
def pass_context(context: TracingContext) -> Iterator[None]:
    """The state under which a pass or a compiler may work on a graph after its capture has ended."""
    with tracing(context), torch.no_grad(), torch._C._DisableAutocast():
        yield


class LateBound:
    """A compiler callback's answer whose body is set after torch has returned.

    Keeps the graph, its example inputs and the tracing state that compilers expect around them.
    Boxed: one list argument, which the body may empty.
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
        """The state under which a pass or a compiler may work on the graph after the capture has ended."""
        self.tracing_context.fw_metadata = self.fw_metadata
        with pass_context(self.tracing_context):
            yield


def parameter_of(node: torch.fx.Node) -> str | None:
    """The qualified name of the parameter or buffer that this placeholder is, or is a component of."""
    desc = node.meta.get("desc")
    while isinstance(base := getattr(desc, "base", None), descriptors.AOTInput):
        desc = base
    return desc.target if isinstance(desc, descriptors.ParamAOTInput | descriptors.BufferAOTInput) else None


def gradient_of(desc: Any) -> str | None:
    """The qualified name of the parameter whose gradient, or a component of it, this output's descriptor says."""
    while isinstance(base := getattr(desc, "base", None), descriptors.AOTOutput):
        desc = base
    source = getattr(desc, "grad_of", None)
    return source.target if isinstance(source, descriptors.ParamAOTInput) else None


def written_by(desc: Any) -> str | None:
    """The qualified name of the parameter or buffer whose new value this output's descriptor says it is."""
    while isinstance(base := getattr(desc, "base", None), descriptors.AOTOutput):
        desc = base
    source = getattr(desc, "mutated_input", None)
    while isinstance(base := getattr(source, "base", None), descriptors.AOTInput):
        source = base
    return source.target if isinstance(source, descriptors.ParamAOTInput | descriptors.BufferAOTInput) else None


def is_parameter(node: torch.fx.Node) -> bool:
    """True for a placeholder that is a parameter, or a tensor component of one."""
    desc = node.meta.get("desc")
    return desc is not None and desc.is_param() and isinstance(node.meta.get("val"), torch.Tensor)


def is_tangent(node: torch.fx.Node) -> bool:
    """True for a placeholder that is a tangent or a component of one."""
    desc = node.meta.get("desc")
    return desc is not None and desc.is_tangent()


def boxed(graph: Graph) -> Callable[[list[Any]], Any]:
    """A callable of one list that it empties, so that inputs are freed as soon as they are used."""
    copy = clone(graph)
    copy.graph.set_codegen(_BoxedCodeGen())
    copy.recompile()
    return copy.forward


def clone(graph: Graph) -> Graph:
    """A copy that shares no node with `graph`: names, metadata dictionaries and the calling convention are kept.

    Node by node as `Graph.create_node` does it, but for its checks of what was checked before: half the time.
    """
    old = graph.graph
    new = torch.fx.Graph()
    names, known = new._graph_namespace, old._graph_namespace
    names._used_names, names._base_count = set(known._used_names), dict(known._base_count)
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in old.nodes:
        args, kwargs = (torch.fx.node.map_arg(a, copies.__getitem__) for a in (node.args, node.kwargs))
        copies[node] = put(new, node, node.name, args, kwargs, dict(node.meta))
    return like(graph, new)


def put(graph: torch.fx.Graph, old: torch.fx.Node, name: str, args: Any, kwargs: Any, meta: Any) -> torch.fx.Node:
    """A node at the end of `graph` with the operator of `old`, without the checks that `old` has passed.

    name: one that `graph` has given, or that is free in it.
    """
    node = torch.fx.Node(graph, name, old.op, old.target, args, kwargs, old.type)
    node.meta = meta
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def like(graph: Graph, new: torch.fx.Graph) -> Graph:
    """A module around `new` with the calling convention, attributes and metadata of `graph`."""
    new.set_codegen(graph.graph._codegen)
    module = _LazyGraphModule(graph, new)  # its code is written when it is first run or read
    module.meta = dict(graph.meta)
    return module
