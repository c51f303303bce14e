"""`look_inside`: the kernels, buffers and partitions that Inductor makes of a function, before anything is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.traceback import preserve_node_meta

from workbench.errors import WorkbenchError
from workbench.graph.facts import GraphFacts, set_facts
from workbench.graph.read.kernels import Kernel, Kernels, find_kernels
from workbench.graph.read.nodes import provenance
from workbench.lab.inside_inductor import torch_api as inside
from workbench.lab.inside_inductor.torch_api import Part
from workbench.recipe.strict_toml import suggestion
from workbench.torch_api import aot
from workbench.torch_api.inductor.lowering import decomposition_table
from workbench.torch_api.inductor.regions import check_options


def _as_module(function: Callable[..., Any]) -> nn.Module:
    """A module whose forward is `function`, renamed: torch.export keeps source lines of a `forward` only."""
    def forward(*inputs: Any) -> Any:  # a builtin has no signature
        return function(*inputs)

    if isinstance(function, FunctionType):
        code = function.__code__.replace(co_name="forward")
        forward = FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    module = nn.Module()
    module.forward = forward
    return module


@dataclass(frozen=True)
class Inside:
    """What Inductor made of a function. Call it like the function: only then are C++ kernels compiled.

    graph: Inductor's input, decomposed. Its inputs have their own names; the code calls them `arg0_1` and so on, as
    torch.compile does. code: the Python that Inductor wrote, with the sources of its kernels. estimate: Inductor's own,
    of the bytes at the peak without inputs. parts: the sections that may each become one CUDA graph. sizes: bytes of
    each buffer in the code. wrapper: the FX graph that a `backend` received.
    """

    graph: GraphModule = field(repr=False)
    code: str = field(repr=False)
    estimate: int = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    sizes: dict[str, int | None] = field(repr=False)
    kernels: Kernels
    wrapper: GraphModule | None = field(repr=False)
    _compiled: Any = field(repr=False)
    _tensors: tuple[Any, ...] = field(repr=False)

    def lines(self, kernel: Kernel) -> tuple[str, ...]:
        """The user's source lines that a kernel computes, each once, in the order of its nodes."""
        nodes = {n.name: n for n in self.graph.graph.nodes}
        return tuple(dict.fromkeys(text for name in kernel.nodes if (text := provenance(nodes[name]).text)))

    def __call__(self, *inputs: Any) -> Any:
        """Run the function."""
        remaining = iter(inputs)
        flat = [next(remaining) if tensor is None else tensor for tensor in self._tensors]
        with torch.no_grad():  # kernels write into their arguments
            out = self._compiled(flat)
        if isinstance(out, torch.Tensor):  # an FX graph with one output returns it without a list
            return out
        return out[0] if len(out) == 1 else tuple(out)


def look_inside(
    function: Callable[..., Any] | nn.Module,
    *inputs: Any,
    config: Mapping[str, Any] | None = None,
    eager: Iterable[str] = (),
    backend: Callable[[GraphModule], Callable[..., Any]] | None = None,
) -> Inside:
    """Export `function`, apply Inductor's decompositions, and let Inductor schedule and write its code.

    config: Inductor's options. eager: names of nodes in the graph that the eager operator computes, without fusion.
    backend: called with the FX graph of the code that calls the kernels, it returns the function that runs instead;
    Inductor needs kernels of Triton or of libraries for that.

    Raises WorkbenchError for an unknown option or node, and for a function that changes its inputs.
    """
    check_options(config or {}, "look_inside")
    module = function if isinstance(function, nn.Module) else _as_module(function)
    with warnings.catch_warnings(), preserve_node_meta():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, inputs, strict=False).run_decompositions(decomposition_table())
    if exported.graph_signature.buffers_to_mutate or exported.graph_signature.user_inputs_to_mutate:
        raise WorkbenchError("look_inside: the function changes an input or a buffer: give one that returns "
                             "new tensors")
    graph = exported.graph_module
    operators = {n.name: n for n in graph.graph.nodes if n.op == "call_function"}
    for name in eager:
        if name not in operators:
            hint = suggestion(name, operators)
            raise WorkbenchError(f"look_inside: eager: the graph has no operator node {name!r}{hint}")
        inside.mark_fallback(operators[name])
    wrappers: list[GraphModule] = []

    def receive(gm: GraphModule) -> Callable[..., Any]:
        assert backend is not None
        wrappers.append(gm)
        return backend(gm)

    example = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    before = aot.clone(graph)
    set_facts(before, GraphFacts("forward"))
    inside.name_inputs(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled, lowered = inside.lower(graph, example, dict(config or {}), receive if backend else None)
    kernels = find_kernels(compiled, before)
    assert kernels is not None
    tensors = {**exported.state_dict, **exported.constants}  # an argument of the call has no target
    of_module = tuple(tensors.get(spec.target) for spec in exported.graph_signature.input_specs)
    return Inside(before, lowered.code, lowered.estimate, lowered.parts, lowered.sizes, kernels,
                  wrappers[-1] if wrappers else None, compiled, of_module)
