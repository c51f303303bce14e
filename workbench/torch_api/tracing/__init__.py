"""Tracing a model's forward: what torch refuses, what the forward does in Python, and a whole step by make_fx.

    module_state  a module while its step is traced
    own_code      what the user's code asks of torch, draws, and reads of global variables
    refusals      where and why a model could not be traced
    side_effects  what a traced forward reads and changes in Python
    traced_step   forward, loss and gradients by make_fx
    watched       what a forward read in Python, and the structure of its module, to be compared later
"""
