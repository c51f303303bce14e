"""Passes in the user's own training loop: `as_backend` under `torch.compile`, and `workbench.compile` by our capture.

    backend  a backend for `torch.compile`, with the verdicts of its passes
    compile  a step of the user's module, to be called in its place
"""

from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"as_backend": ".backend"})
