"""Static pictures and tables: one function each. A picture is a PNG with an alternative text and a text form.

    buffers       buffers and the memory they reuse
    colors        the colours of all pictures
    dataflow      a small graph as boxes and arrows
    difference    figures before and after a change
    expert_load   tokens for each expert, step by step
    graphs        a graph, small graphs as rows of letters, collectives, saved tensors
    kernels       kernels with their nodes; replays and their addresses
    memory        live bytes and the peak; saved against recomputed; budgets
    mesh          the slice of a tensor on each rank
    operators     bytes that operators read and write; rounding; the float8 grid
    picture       Picture and Table
    pipeline      the passes and what each proved
    rank_lanes    where each rank stands in its collectives
    rank_values   a cell's result on each rank
    routing       tokens to experts, and slots
    runs          curves of several runs
    step          the changes of one pass to a graph
    timeline      compute and communication over time; CPU launches above device work
    traced_step   a trace's kernels, milliseconds by kind, timed steps
    verdicts      a table of verdicts
"""

from workbench.notebook.draw.buffers import buffers
from workbench.notebook.draw.dataflow import dataflow
from workbench.notebook.draw.difference import difference, verdicts_of_both
from workbench.notebook.draw.expert_load import expert_load
from workbench.notebook.draw.graphs import graph, launches, order, saved
from workbench.notebook.draw.kernels import addresses, kernel_table, kernels, replay
from workbench.notebook.draw.memory import frontier, memory, pareto
from workbench.notebook.draw.mesh import parameters, placements, redistribute, slices
from workbench.notebook.draw.operators import float8_grid, rounding, traffic
from workbench.notebook.draw.picture import Picture, Table, table
from workbench.notebook.draw.pipeline import pipeline
from workbench.notebook.draw.rank_lanes import lanes
from workbench.notebook.draw.routing import routing, slots
from workbench.notebook.draw.runs import curves
from workbench.notebook.draw.step import changes, step
from workbench.notebook.draw.timeline import pace, timeline
from workbench.notebook.draw.traced_step import dots, spans, stacked
from workbench.notebook.draw.verdicts import verdicts

__all__ = ["Picture", "Table", "addresses", "buffers", "changes", "curves", "dataflow", "difference",
           "dots", "expert_load", "float8_grid", "frontier", "graph", "kernel_table", "kernels",
           "lanes", "launches", "memory", "order", "pace", "parameters", "pareto", "pipeline",
           "placements", "redistribute", "replay", "rounding", "routing", "saved", "slices", "slots", "spans",
           "stacked", "step", "table", "timeline", "traffic", "verdicts", "verdicts_of_both"]
