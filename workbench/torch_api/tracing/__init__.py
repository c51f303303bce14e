"""Tracing a model's forward: what torch refuses, and a whole step by make_fx.

    refusals      where and why a model could not be traced
    traced_step   forward, loss and gradients by make_fx
"""
