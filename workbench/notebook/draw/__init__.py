"""Static pictures and tables: one function each. A picture is a PNG with an alternative text and a text form.

Pictures that one lesson alone calls lie in its folder.

    colors        the colours of all pictures
    dataflow      a small graph as boxes and arrows
    difference    figures before and after a change
    expert_load   tokens for each expert, step by step
    graphs        a graph, saved tensors
    kernels       kernels by number, and inputs of replays
    launch_bound  does the CPU or the device set the pace
    memory        live bytes and the peak
    mesh          the slice of a tensor on each rank
    picture       Picture and Table
    pipeline      the passes and what each proved
    rank_values   a cell's result on each rank
    runs          curves of several runs
    slots         slots, and the tokens in them
    stacked       bars of milliseconds by kind
    step          the changes of one pass to a graph
    timeline      compute and communication over time; CPU launches above device work
    verdicts      a table of verdicts
"""

from workbench.notebook.draw.dataflow import dataflow
from workbench.notebook.draw.difference import difference, verdicts_of_both
from workbench.notebook.draw.expert_load import expert_load
from workbench.notebook.draw.graphs import graph, saved
from workbench.notebook.draw.kernels import kernels, replay
from workbench.notebook.draw.memory import memory
from workbench.notebook.draw.mesh import placements, slices
from workbench.notebook.draw.picture import Picture, Table, table
from workbench.notebook.draw.pipeline import pipeline
from workbench.notebook.draw.runs import curves
from workbench.notebook.draw.slots import slots
from workbench.notebook.draw.stacked import stacked
from workbench.notebook.draw.step import changes, step
from workbench.notebook.draw.timeline import pace, timeline
from workbench.notebook.draw.verdicts import verdicts

__all__ = ["Picture", "Table", "changes", "curves", "dataflow", "difference", "expert_load", "graph", "kernels",
           "memory", "pace", "pipeline", "placements", "replay", "saved", "slices", "slots", "stacked", "step", "table",
           "timeline", "verdicts", "verdicts_of_both"]
