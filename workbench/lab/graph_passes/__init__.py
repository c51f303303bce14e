"""Passes across the border: ours as plain functions for other lists, and other lists under our verdicts.

    bridge      direction, module and value of nodes, here and there
    graph_pass  a pass of ours as a function of a graph
    judge       a list of such functions, judged on our capture or in anybody's trainer
"""

from workbench.recipe.public_names import on_use

_JUDGE = dict.fromkeys(("judge_graph_passes", "judged"), ".judge")
__getattr__ = on_use(__name__, {"as_graph_pass": ".graph_pass", **_JUDGE})
