"""`estimates = "measured"` of a pass: matmuls and attentions are timed once, and the times kept in a file.

    measure  rank 0 times the operators of a graph for all ranks
"""

from workbench.recipe.hooks import declare_hook

declare_hook("measured_costs.measure", "workbench.lab.measured_costs.measure:measure")
