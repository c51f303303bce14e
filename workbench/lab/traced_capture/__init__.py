"""capture = "traced": make_fx runs forward, loss and gradients once on fake shards, and notes the operators.

    capture  the traced joint graph
    checks   whether the backward computes again what the tags ask for
    cut      the graph becomes forward and backward, with tagged values repeated
"""

from workbench.recipe.hooks import declare_hook

declare_hook("capture.traced", "workbench.lab.traced_capture.capture:traced")
