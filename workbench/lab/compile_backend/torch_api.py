"""The input of a `torch.compile` backend, and its way through AOTAutograd with both bodies left open.

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


def find_module_inputs(
    graph: GraphModule, example_inputs: Sequence[Any]
) -> dict[int, tuple[str, bool]]:
    """By position: the qualified name of each input that is a parameter or buffer, and whether it is a parameter.

    graph: Dynamo's. Its inputs have sources such as `L['self']._modules['norm']._parameters['weight']`.
    """
    module_inputs = {}
    for index, (node, value) in enumerate(
        zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    ):
        source = getattr(getattr(node, "_dynamo_source", None), "name", "")
        steps = _STEP.findall(source() if callable(source) else source)  # a method before 2.13
        if isinstance(value, torch.Tensor) and steps and steps[-1][0] != "modules":
            module_inputs[index] = (
                ".".join(name for _, name in steps),
                isinstance(value, torch.nn.Parameter),
            )
    return module_inputs


def describe_inputs(joint: GraphModule, module_inputs: dict[int, tuple[str, bool]]) -> None:
    """Give the placeholders of parameters and buffers the descriptors that a capture of the module gives them.

    torch.compile knows inputs by position only.
    """
    for node in joint.graph.find_nodes(op="placeholder"):
        if "desc" in node.meta:
            node.meta["desc"] = _described(node.meta["desc"], module_inputs)


def _described(desc: Any, module_inputs: dict[int, tuple[str, bool]]) -> Any:
    if isinstance(desc, descriptors.PlainAOTInput) and desc.idx in module_inputs:
        name, parameter = module_inputs[desc.idx]
        return descriptors.ParamAOTInput(name) if parameter else descriptors.BufferAOTInput(name)
    base = getattr(desc, "base", None)  # a component of a DTensor
    if isinstance(base, descriptors.AOTInput) and dataclasses.is_dataclass(desc):
        return dataclasses.replace(desc, base=_described(base, module_inputs))  # type: ignore[call-arg, type-var]
    return desc


@dataclasses.dataclass
class JointFromCompile:
    """The joint graph of torch.compile, while its tracing state is open. known: what is learned of it, for verdicts."""

    graph: GraphModule
    known: Any = None
    passes: tuple[str, ...] = ()
    broken: UnusableGraph | None = None

    def require_open(self) -> None:
        """Raise UnusableGraph if a pass has broken the graph. It is always open while a backend has it."""
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
    """Trace the backward of Dynamo's `graph`, let `joint` transform the joint graph in place, and split it by min-cut.

    Returns the callable for Dynamo, and the forward and backward, whose bodies are open. The pair is None where nothing
    needs a gradient; such a graph runs unchanged.
    """
    module_inputs = find_module_inputs(graph, example_inputs)
    slots: dict[str, aot.LateBound] = {}

    def compiler(which: str) -> Callable[[GraphModule, list[Any]], Callable[[list[Any]], Any]]:
        def keep(traced: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
            slot = slots[which] = aot.LateBound(traced, inputs)
            if which == "inference":
                slot.body = aot.boxed(traced)

            def call(
                args: list[Any],
            ) -> Any:  # a function: torch's wrapper copies the attribute from it
                return slot(args)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return keep

    def partition(
        traced: GraphModule, inputs: Any, **keywords: Any
    ) -> tuple[GraphModule, GraphModule]:
        describe_inputs(traced, module_inputs)
        capture = JointFromCompile(traced)
        joint(capture)
        with partitioning.settings():
            return partitioning.PARTITIONERS["min_cut"](
                aot.clone(capture.graph), inputs, **keywords
            )

    compiled = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions=decompositions,
    )
    # or the backward would be compiled during the first step
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        function = compiled(graph, example_inputs)
    return function, (slots["forward"], slots["backward"]) if "backward" in slots else None
