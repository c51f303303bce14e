"""full_inductor_compilation: each partitioned graph becomes one compiled callable.

Its result is no graph, so the example prints the kernels that Inductor wrote for a CPU, each with its nodes:

    >>> example("full_inductor_compilation", lambda x, weight: (x @ weight).sigmoid())
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      sum_1: float32 [] = aten.sum(sigmoid)
      ...
    after:
      extern_kernels.mm: mm
      cpp_fused_sigmoid_sum_0: sigmoid, sum_1
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from pydantic import Field
from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.read.nodes import output_values
from workbench.passes.effect import Effect
from workbench.passes.registry import register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api import aot
from workbench.torch_api.inductor import lowering


class InductorOptions(Options):
    """keep_order: calls follow the graph, where passes have put the collectives; only fused kernels can move past
    matmuls. Else calls follow the order that Inductor chooses for peak memory. config: Inductor's own options.
    """

    keep_order: bool = True
    config: dict[str, bool | int | float | str] = Field({})


def compiled_to_a_callable(before: Any, after: Any, options: InductorOptions) -> Effect:
    """Every graph is a compiled callable now."""
    left = [type(a).__name__ for a in after if isinstance(a, GraphModule)]
    return Effect(not left, f"{len(left)} of {len(after)} are still FX graphs" if left else "", {
        "callables": [type(a).__name__ for a in after]
    })


@register_pass(
    "full_inductor_compilation", stage="lowering", numerics="lossy", tolerance=1e-5,
    changes="each graph becomes one compiled callable", options=InductorOptions,
    requires={"inductor_decomposition"}, needs={"compiler", "static_shapes"},
    effect=compiled_to_a_callable, source="torch._inductor.compile_fx.compile_fx_inner",
)
def full_inductor_compilation(
    gm: GraphModule, example_inputs: list[Any], *, options: InductorOptions
) -> Callable[[list[Any]], Any]:
    """Compile one graph with `compile_fx_inner`; the result is boxed (one list argument).

    A fake world has nothing to run them on: there, C++ kernels are written and not built.
    """
    # not at the top: it loads all of Inductor's lowerings, 0.8 s
    from workbench.torch_api.inductor.kept_order import graph_order, kept_fusions

    facts = facts_of(gm)
    if facts.part == "backward":
        example_inputs = _as_saved(example_inputs, facts.step.forward_strides[facts.step.results :])
    # Inductor's own order, for peak memory, puts each wait next to its collective again
    config = {**(graph_order() if options.keep_order else {}), **options.config}
    with kept_fusions() if options.keep_order else nullcontext():
        compiled, strides = compile_graph(gm, example_inputs, config)
    if facts.part == "forward":
        facts.step.forward_strides = strides
    return compiled


def compile_graph(
    gm: GraphModule, example_inputs: list[Any], config: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """`compile_fx_inner` on a forward or backward graph: the boxed callable, and the strides of its outputs."""
    facts = facts_of(gm)
    backward = facts.part == "backward"
    return lowering.compile_inner(
        gm,
        example_inputs,
        is_backward=backward,
        static=[i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))
                if aot.is_parameter(n) or (facts.part == "step" and aot.is_state(n))],
        visible=len(output_values(gm)) if backward else facts.step.results,
        config=config,
        once=facts.step.saved_names,
        build=facts.world != "fake",
    )


def _as_saved(example_inputs: list[Any], strides: list[tuple[int, ...] | None]) -> list[Any]:
    """The backward's example inputs with the layout in which the compiled forward saves them."""
    fixed = list(example_inputs)
    for i, stride in enumerate(strides):
        value = fixed[i]
        if (
            stride is not None
            and isinstance(value, torch.Tensor)
            and value.stride() != tuple(stride)
        ):
            fixed[i] = value.as_strided(value.size(), stride)
    return fixed
