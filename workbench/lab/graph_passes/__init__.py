"""`as_graph_pass`: a pass as a plain function of a graph, for the pass lists of other compilers' pipelines.

    graph_pass  the function, and its records
"""

from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"as_graph_pass": ".graph_pass"})
