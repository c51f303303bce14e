"""What "One graph for the whole step" alone uses.

    whole_steps  a graph's lines, traffic, recorded steps, late reads; graders
"""
