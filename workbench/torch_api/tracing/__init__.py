"""Tracing a model's forward: what torch refuses, and a whole step by make_fx.

    module_state  a module while its step is traced
    refusals      where and why a model could not be traced
    traced_step   forward, loss and gradients by make_fx
"""
