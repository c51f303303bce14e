"""AOTAutograd and Dynamo entry points that torch keeps private.

Source: torch/_functorch/aot_autograd.py (`aot_export_joint_with_descriptors` and its companion) and
torch/_dynamo/functional_export.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
import torch._dynamo.functional_export
import torch.fx.traceback
from torch._functorch import partitioners
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._logging._internal import log_state, trace_log
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen

from workbench.torch_api.flex import cpu_backward
from workbench.torch_api.ops import draws

Graph = torch.fx.GraphModule


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """The settings a faithful capture needs.

    The fake tensor cache returns shared meshes for DTensor inputs, and node metadata is dropped unless asked for.
    """
    with (torch._dynamo.config.patch(fake_tensor_cache_enabled=False), torch.fx.traceback.preserve_node_meta(),
          cpu_backward()):
        yield


def dynamo_capture(module: torch.nn.Module, args: tuple[Any, ...]) -> Graph:
    """The module as one FX graph over its own parameters; `meta["tracing_context"]` holds Dynamo's context."""
    capture: Callable[..., Any] = torch._dynamo.functional_export.dynamo_graph_capture_for_export
    torch._dynamo.reset()
    return capture(module)(*args)


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
    """torch's `JointWithDescriptors`; `contexts` holds what compiling needs."""
    contexts.enter_context(tracing(graph.meta["tracing_context"]))
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


PARTITIONERS: dict[str, Callable[..., tuple[Graph, Graph]]] = {
    "min_cut": partitioners.min_cut_rematerialization_partition,
    "default": partitioners.default_partition,
}


def compile_joint(joint: Any, by: str = "min_cut") -> tuple[Callable[..., Any], LateBound, LateBound]:
    """Partition with one of PARTITIONERS and wrap in autograd, leaving both bodies open.

    torch's own choice here is `default_partition`, which saves views of gathered weights.
    """
    found: dict[str, LateBound] = {}

    def callback(name: str) -> Callable[..., LateBound]:
        def compiler(graph: Graph, example_inputs: list[Any]) -> LateBound:
            found[name] = LateBound(graph, example_inputs)
            return found[name]

        return compiler

    # torch goes by the operator's tag, and would thread the generator's state through attention without dropout;
    # on 2.13 the state lands behind the saved meshes, where the runtime does not look for tensors
    with (mock.patch.object(partitioners, "has_recomputable_rng_ops", recomputes_draws), _without_texts(joint)):
        function = aot_compile_joint_with_descriptors(
            joint,
            partition_fn=PARTITIONERS[by],
            fw_compiler=callback("forward"),
            bw_compiler=callback("backward"),
        )
    return function, found["forward"], found["backward"]


@contextlib.contextmanager
def _without_texts(joint: Any) -> Iterator[None]:
    """Graphs are not written as text and code while nobody reads it, neither torch's logs nor a run: a third of the
    time. A lazy graph module writes its code when it is first run.
    """
    read = bool(trace_log.handlers) or any(map(log_state.is_artifact_enabled, ("aot_joint_graph", "aot_graphs")))
    config = dataclasses.replace(joint._aot_state.aot_config, enable_log=read)
    with mock.patch.object(joint._aot_state, "aot_config", config), _use_lazy_graph_module(True):
        yield


def recomputes_draws(graph: Graph) -> bool:
    """Whether something that draws random numbers is to be run again in the backward."""
    return any(partitioners.must_recompute(n) and draws(n) for n in graph.graph.nodes)


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
        copy = torch.fx.Node(new, node.name, node.op, node.target, args, kwargs, node.type)
        copy.meta = dict(node.meta)
        names.associate_name_with_obj(node.name, copy)
        new._insert(copy)
        new._find_nodes_lookup_table.insert(copy)
        new._len += 1
        copies[node] = copy
    return like(graph, new)


def like(graph: Graph, new: torch.fx.Graph) -> Graph:
    """A module around `new` with the calling convention, attributes and metadata of `graph`."""
    new.set_codegen(graph.graph._codegen)
    module = _LazyGraphModule(graph, new)  # its code is written when it is first run or read
    module.meta = dict(graph.meta)
    return module
