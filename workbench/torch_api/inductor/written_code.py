"""Code of a graph, and code that Inductor made of one, taken out of one process and loaded in another.

Source: torch/fx/graph.py (`_BoxedCodeGen`), torch/_functorch/_aot_autograd/descriptors.py,
torch/_inductor/output_code.py (`CompiledFxGraph`), torch/_inductor/utils.py (`align_inputs_from_check_idxs`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch.fx.graph import _BoxedCodeGen

from workbench.errors import WorkbenchError
from workbench.torch_api.aot import clone


def written(compiled: Any) -> tuple[str, dict[str, list[int]]] | None:
    """The Python source of what `compile_fx_inner` returned, and which of its inputs must be aligned; None for others.

    Raises WorkbenchError for code that reads constants from this process.
    """
    source = getattr(compiled, "source_code", None)
    if not isinstance(source, str) or not hasattr(compiled, "inputs_to_check"):
        return None
    held = [*(compiled.constants or {}), *(compiled.torchbind_constants or {})]
    if held:
        raise WorkbenchError(f"Inductor's code reads the constant {held[0]!r} from this process: make it a buffer of "
                             "the model")
    return source, {"check": list(compiled.inputs_to_check), "written": sorted(compiled.mutated_input_idxs or ())}


def callable_of(module: ModuleType, align: dict[str, list[int]]) -> Callable[[list[Any]], Sequence[Any]]:
    """The boxed function of a module that Inductor wrote."""
    from torch._inductor.utils import align_inputs_from_check_idxs
    from torch.utils._ordered_set import OrderedSet

    function: Callable[[list[Any]], Sequence[Any]] = align_inputs_from_check_idxs(
        module.call, align["check"], OrderedSet(align["written"]))
    return function


def one_list_code(graph: torch.fx.GraphModule) -> Any:
    """The source of a `forward(self, args_list)`, which empties its list, and the globals that it reads, by name."""
    copy = clone(graph)
    copy.graph.set_codegen(_BoxedCodeGen())
    return copy.graph.python_code("self")


def input_description(of: str | None, tangent: bool) -> Any:
    """What an input's `meta["desc"]` holds: of a parameter or buffer by name, of a tangent, or of anything else."""
    if of is not None:
        return descriptors.ParamAOTInput(of)
    return descriptors.TangentAOTInput(descriptors.PlainAOTOutput(0)) if tangent else descriptors.PlainAOTInput(0)
