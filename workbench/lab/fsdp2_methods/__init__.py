"""FSDP2's methods on the modules of an adopted model, such as `set_requires_gradient_sync`.

    accumulation  gradients that add up on each rank until the last microbatch
    methods       the methods: what works, what is a hint, what is refused
"""

from workbench.recipe.hooks import declare_hook

declare_hook("adopt.fsdp2_methods", "workbench.lab.fsdp2_methods.methods:give_methods")
