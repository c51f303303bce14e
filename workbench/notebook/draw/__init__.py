"""Static pictures and tables: one function each. A picture is a PNG with an alternative text and a text form.

Pictures that one lesson alone calls lie in its folder. A plugin adds others, as the course does:
`declare_hook("draw.NAME", "MODULE:FUNCTION")`.

    colors       the colours of all pictures
    graphs       a graph
    memory       live bytes and the peak
    picture      Picture and Table
    pipeline     the passes and what each proved
    rank_values  a cell's result on each rank
    step         the changed lines of one pass
    timeline     compute and communication over time
    verdicts     a table of verdicts
"""

from typing import Any

from workbench.notebook.draw.graphs import graph
from workbench.notebook.draw.memory import memory
from workbench.notebook.draw.picture import Picture, Table, table
from workbench.notebook.draw.pipeline import pipeline
from workbench.notebook.draw.step import changes
from workbench.notebook.draw.timeline import timeline
from workbench.notebook.draw.verdicts import verdicts
from workbench.recipe.hooks import hook_of, values_of

__all__ = ["Picture", "Table", "changes", "graph", "memory", "pipeline", "table", "timeline", "verdicts"]


def __getattr__(name: str) -> Any:
    if name not in values_of("draw"):
        raise AttributeError(f"draw has no picture {name!r}")
    return hook_of("draw", name)
