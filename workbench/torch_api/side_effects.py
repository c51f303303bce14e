"""Side effects of a traced forward, which Dynamo records and a capture for export leaves out.

Source: torch/_dynamo/output_graph.py (`OutputGraph.get_replayed_side_effect_source_refs`),
torch/_dynamo/side_effects.py (`SideEffects.store_attr_mutations`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, ListVariable, TensorVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

_REFS = "get_replayed_side_effect_source_refs"
_MODULE = re.compile(r"_modules\['([^']+)'\]")
_HELD = re.compile(r"^L\['self'\](?:\._modules\['[^']+'\])*\.(\w+)")


class SideEffect(NamedTuple):
    """The assignment of a new tensor, number or text to an attribute of a module, which is given by its path.

    attribute: of the module, also where a list or dictionary that it holds got the number or text.
    """

    module: str
    attribute: str
    buffer: bool


@contextmanager
def noted_side_effects() -> Iterator[list[SideEffect]]:
    """Inside, collects a traced forward's assignments to buffers, numbers and texts of modules.

    A write into a buffer in place is not collected, since a capture contains it. Neither are tensors and lists of
    tensors that a module keeps for its caller, unless the forward itself reads the attribute before it is assigned.
    Nothing is collected where this torch lacks the method.
    """
    found: list[SideEffect] = []
    refs = getattr(OutputGraph, _REFS, None)
    if refs is None:
        yield found
        return

    def noted(self: Any, **options: Any) -> Any:
        for variable in self.side_effects._get_modified_vars():
            assigned = self.side_effects.store_attr_mutations.get(variable, {})
            read = {guard.originating_source.name for guard in self.guards}
            found.extend(effect for effect in _effects(variable, assigned, read) if effect not in found)  # asked twice
        return refs(self, **options)

    with mock.patch.object(OutputGraph, _REFS, noted):
        yield found


def _effects(variable: Any, assigned: dict[str, Any], read: Collection[str]) -> Iterator[SideEffect]:
    """read: the sources whose values at the capture the graph relies on."""
    source = str(variable.source.name) if variable.source is not None else ""
    path = ".".join(_MODULE.findall(source))
    if isinstance(variable, UnspecializedNNModuleVariable):
        yield from (SideEffect(path, name, False) for name, value in assigned.items()
                    if isinstance(value, ConstantVariable) or f"{source}.{name}" in read)
    elif source.endswith(("._buffers", "['_buffers']")):
        for key, value in variable.items.items():
            if isinstance(value, TensorVariable) and value.source is None and not _in_place(value.as_proxy().node):
                yield SideEffect(path, key.vt.as_python_constant(), True)
    elif (held := _HELD.search(source)) and isinstance(variable, ListVariable | ConstDictVariable):
        values = variable.items.values() if isinstance(variable.items, dict) else variable.items
        if any(isinstance(value, ConstantVariable) for value in values):
            yield SideEffect(path, held[1], False)


def _in_place(node: Any) -> bool:
    """Whether the node's result is a tensor that it wrote to, as in `x.add_(1)` and `torch.mv(a, b, out=x)`."""
    return "out" in node.kwargs or (node.op == "call_method" and node.target.endswith("_"))
