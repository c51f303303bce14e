"""`workbench.compile`: a step of the user's own module by our capture, for the user's own training loop.

    compile  the capture, and the step that is called in place of the module
"""
