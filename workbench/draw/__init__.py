"""Static pictures and tables: one function each. A picture is a PNG with an alternative text and a text form."""

from workbench.draw.ablation import ablation
from workbench.draw.buffers import buffers
from workbench.draw.difference import difference, verdicts_of_both
from workbench.draw.expert_load import expert_load
from workbench.draw.graphs import graph, launches, saved
from workbench.draw.kernels import kernel_code, kernel_table, kernels, replay
from workbench.draw.memory import memory
from workbench.draw.mesh import parameters, placements, redistribute, slices
from workbench.draw.pace import pace
from workbench.draw.pipeline import pipeline
from workbench.draw.routing import routing, slots
from workbench.draw.show import Picture, Table, table
from workbench.draw.step import changes, step
from workbench.draw.timeline import timeline
from workbench.draw.training import losses
from workbench.draw.verdicts import verdicts

__all__ = ["Picture", "Table", "ablation", "buffers", "changes", "difference", "expert_load", "graph", "kernel_code",
           "kernel_table", "kernels", "launches", "losses", "memory", "pace", "parameters", "pipeline", "placements",
           "redistribute", "replay", "routing", "saved", "slices", "slots", "step", "table", "timeline", "verdicts",
           "verdicts_of_both"]
