"""Capture that does not grow with depth: of alike blocks in a row a few are captured, and the rest are stamped.

`find_run` compares the modules, `short` leaves blocks out, and after a capture of that `stamp` puts them in again.
It compares two neighbouring blocks of the graph before it takes one of them as the pattern. Where anything differs,
NotAlike says what, and the whole module is to be captured. A block that is left out is judged by its module alone:
what its forward reads elsewhere, of a global or of its class by its own identity, is not seen.

    blocks  which blocks of a model are alike
    graph   copy a block of a joint graph
    order   where copies go
    pairs   match two neighbouring blocks
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from workbench.graph.stamping.blocks import AlikeBlocks, find_run, short
from workbench.graph.stamping.graph import Stamp
from workbench.graph.stamping.order import Names, longer, turns_of
from workbench.torch_api import stamping
from workbench.torch_api.garbage import uncollected

__all__ = ["AlikeBlocks", "find_run", "short", "stamp"]

_BLOCK = re.compile(r"^((?:L\['self'\]\W+(?:_modules\W+)?)?layers\W+(?:_modules\W+)?)(\d+)\b")


@uncollected()
def stamp(export: Any, tracing_context: Any, module: nn.Module, run: AlikeBlocks) -> None:
    """Make `export`, of the short module, that of `module`.

    Raises NotAlike where two blocks of the graph differ; `export` is then spoilt.
    """
    modules = {f"L['self'].{path}": str(id(part)) for path, part in module.named_modules()}
    names = Names(_BLOCK, run.lower, run.extra, modules)

    def order(keys: Sequence[stamping.Key]) -> stamping.Places:
        turns = turns_of([(kind, names.block(name)) for kind, name in keys], run.lower)
        return longer(len(keys), turns, run.extra)

    made = Stamp(export.graph_module, names).stamped
    export.graph_module = made
    inputs = [n.meta.get("val") for n in made.graph.find_nodes(op="placeholder")]
    stamping.lengthen(export, tracing_context, order, names.of_copy, module, inputs)
