"""Capture in a time that does not grow with depth: a few of many alike blocks are captured, the others are copies.

`capture_few` is the one hook. `find_run` compares the modules, `short` leaves blocks out, and `stamp` copies a captured
block for each of them. Before that, `stamp` compares two neighbouring blocks in the graph. Where anything differs,
NotAlike says what, and the whole module has to be captured. A block that is left out is compared by its module alone:
if its forward reads a global, or asks which block it is, the comparison does not see that.

    blocks  which blocks of a model are alike
    graph   copy a block of a joint graph
    order   where copies go
    pairs   match two neighbouring blocks
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from workbench.errors import NotAlike
from workbench.graph.stamping.blocks import AlikeBlocks, find_run, short
from workbench.graph.stamping.graph import Stamp
from workbench.graph.stamping.order import Names, longer, turns_of
from workbench.torch_api import stamping
from workbench.torch_api.garbage import uncollected

__all__ = ["AlikeBlocks", "capture_few", "find_run", "short", "stamp"]
Captured = TypeVar("Captured")  # with `export` and `tracing_context`

_BLOCK = re.compile(r"^((?:L\['self'\]\W+(?:_modules\W+)?)?layers\W+(?:_modules\W+)?)(\d+)\b")


def capture_few(module: nn.Module, capture: Callable[[nn.Module], Captured]) -> tuple[Captured | None, int | str]:
    """`capture` of a few of the module's blocks, made that of all, and the number of copied blocks.

    None and the reason where the blocks are not alike, or too few.
    """
    try:
        run = find_run(module)
        few: Any = capture(short(module, run))
        stamp(few.export, few.tracing_context, module, run)
    except NotAlike as unlike:
        return None, str(unlike)
    return few, run.extra


@uncollected()
def stamp(export: Any, tracing_context: Any, module: nn.Module, run: AlikeBlocks) -> None:
    """Turn `export`, of the short module, into that of `module`.

    Raises NotAlike where two blocks of the graph differ; `export` can then not be used any more.
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
