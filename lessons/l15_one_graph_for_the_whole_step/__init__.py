"""What "One graph for the whole step" alone uses.

    pictures     small graphs as rows of letters
    whole_steps  a graph's lines, traffic, recorded steps, late reads; graders
"""
