"""`as_backend`, `as_graph_pass`: our passes in other compilers' pipelines, under `torch.compile` and in torchtitan's.

    backend     a backend for `torch.compile`, with the verdicts of its passes
    graph_pass  a pass as a plain function of a graph
"""

from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"as_backend": ".backend", "as_graph_pass": ".graph_pass"})
