"""A graph's Python code, and placeholders that are described as AOTAutograd describes them.

Source: torch/fx/graph.py (`_BoxedCodeGen`), torch/_functorch/_aot_autograd/descriptors.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch.fx.graph import _BoxedCodeGen

from workbench.torch_api.aot import clone


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
