"""Verdicts that run a step on real ranks.

    authoring_proof  replicas of gradients, and the plain module
    executed_proof   what a step ran, by the names of operators or kernels
    numerics_proof   each pass against the graph it received, and the whole list against eager
    two_steps        two training steps, eager and compiled
"""
