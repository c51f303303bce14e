"""Static pictures and tables: one function each. A picture is a PNG with an alternative text and a text form.

Pictures that one lesson alone calls lie in its folder.

    colors       the colours of all pictures
    dataflow     a small graph as boxes and arrows
    difference   figures and verdicts before and after a change
    graphs       a graph, saved tensors
    memory       live bytes and the peak
    picture      Picture and Table
    pipeline     the passes and what each proved
    rank_values  a cell's result on each rank
    runs         curves of several runs
    step         the changed lines of one pass
    timeline     compute and communication over time
    verdicts     a table of verdicts
"""

from workbench.notebook.draw.dataflow import dataflow
from workbench.notebook.draw.difference import difference
from workbench.notebook.draw.graphs import graph, saved
from workbench.notebook.draw.memory import memory
from workbench.notebook.draw.picture import Picture, Table, table
from workbench.notebook.draw.pipeline import pipeline
from workbench.notebook.draw.runs import curves
from workbench.notebook.draw.step import changes
from workbench.notebook.draw.timeline import timeline
from workbench.notebook.draw.verdicts import verdicts

__all__ = ["Picture", "Table", "changes", "curves", "dataflow", "difference", "graph", "memory",
           "pipeline", "saved", "table", "timeline", "verdicts"]
