"""What a backend of `torch.compile` gets, and how its graphs go through AOTAutograd with the bodies left open.

Source: torch/_dynamo/backends/common.py (`aot_autograd`) and torch/_functorch/aot_autograd.py
(`aot_module_simplified`); the names of inputs are Dynamo's sources, torch/_guards.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import descriptors
from torch._guards import TracingContext
from torch.fx import GraphModule

from workbench.errors import UnusableGraph
from workbench.torch_api import aot, partitioning

_STEP = re.compile(r"_(modules|parameters|buffers)\['([^']+)'\]")


def held_by_module(graph: GraphModule, example_inputs: Sequence[Any]) -> dict[int, tuple[str, bool]]:
    """By position: the qualified name of each input that is a parameter or a buffer, and whether it is a parameter.

    `graph` is Dynamo's, whose inputs say where they were found: `L['self']._modules['norm']._parameters['weight']`.
    """
    found = {}
    for index, (node, value) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        source = getattr(getattr(node, "_dynamo_source", None), "name", "")
        steps = _STEP.findall(source() if callable(source) else source)  # a method before 2.13
        if isinstance(value, torch.Tensor) and steps and steps[-1][0] != "modules":
            found[index] = ".".join(name for _, name in steps), isinstance(value, torch.nn.Parameter)
    return found


def describe_inputs(joint: GraphModule, held: dict[int, tuple[str, bool]]) -> None:
    """Let the placeholders of parameters and buffers say so, as a capture of the module itself does.

    torch.compile knows every input by its position alone.
    """
    for node in joint.graph.find_nodes(op="placeholder"):
        if "desc" in node.meta:
            node.meta["desc"] = _described(node.meta["desc"], held)


def _described(desc: Any, held: dict[int, tuple[str, bool]]) -> Any:
    if isinstance(desc, descriptors.PlainAOTInput) and desc.idx in held:
        name, parameter = held[desc.idx]
        return descriptors.ParamAOTInput(name) if parameter else descriptors.BufferAOTInput(name)
    base = getattr(desc, "base", None)  # a component of a DTensor
    if isinstance(base, descriptors.AOTInput) and dataclasses.is_dataclass(desc):
        return dataclasses.replace(desc, base=_described(base, held))  # type: ignore[call-arg, type-var]
    return desc


@dataclasses.dataclass
class JointFromCompile:
    """The joint graph that torch.compile hands over, while its tracing state is open."""

    graph: GraphModule
    passes: tuple[str, ...] = ()
    broken: UnusableGraph | None = None

    def require_open(self) -> None:
        """It is open as long as a backend can see it. Raises what a pass has broken."""
        if self.broken is not None:
            raise self.broken

    @contextlib.contextmanager
    def context(self) -> Iterator[list[Any]]:
        """torch's tracing state around a pass; gives the flat primals and tangents, without values."""
        with aot.pass_context(TracingContext.get()):
            yield [n.meta.get("val") for n in self.graph.graph.find_nodes(op="placeholder")]


def through_autograd(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint: Callable[[JointFromCompile], None],
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> tuple[Callable[..., Any], tuple[aot.LateBound, aot.LateBound] | None]:
    """Trace the backward of Dynamo's `graph`, let `joint` transform the joint graph in place, and split by min-cut.

    The callable for Dynamo, and forward and backward without bodies. None in their place where nothing needs a
    gradient: such a graph runs as it is.
    """
    held = held_by_module(graph, example_inputs)
    found: dict[str, aot.LateBound] = {}

    def compiler(which: str) -> Callable[[GraphModule, list[Any]], Callable[[list[Any]], Any]]:
        def keep(traced: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
            slot = found[which] = aot.LateBound(traced, inputs)
            if which == "inference":
                slot.body = aot.boxed(traced)

            def call(args: list[Any]) -> Any:
                return slot(args)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return keep

    def partition(traced: GraphModule, inputs: Any, **keywords: Any) -> tuple[GraphModule, GraphModule]:
        describe_inputs(traced, held)
        given = JointFromCompile(traced)
        joint(given)
        with partitioning.settings():
            return partitioning.PARTITIONERS["min_cut"](aot.clone(given.graph), inputs, **keywords)

    compiled = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
        partition_fn=partition, decompositions=decompositions,
    )
    # otherwise the backward would be compiled in the middle of the first step
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        function = compiled(graph, example_inputs)
    return function, (found["forward"], found["backward"]) if "backward" in found else None
