"""`as_backend`: our passes in the user's own training loop, under `torch.compile`.

    backend  a backend for `torch.compile`, with the verdicts of its passes
"""

from workbench.recipe.public_names import on_use

__getattr__ = on_use(__name__, {"as_backend": ".backend"})
