"""`as_backend`, `as_graph_pass`: our passes in other compilers' pipelines, under `torch.compile` and in torchtitan's.

    backend     a backend for `torch.compile`, with the verdicts of its passes
    graph_pass  a pass as a plain function of a graph
"""

from workbench.recipe.hooks import declare_hook
from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"as_backend": ".backend", "as_graph_pass": ".graph_pass"})

declare_hook("compile_backend.as_backend", "workbench.lab.compile_backend.backend:as_backend")
declare_hook("compile_backend.as_graph_pass", "workbench.lab.compile_backend.graph_pass:as_graph_pass")
