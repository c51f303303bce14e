"""What "One graph for the whole step" alone uses.

    pictures     the order of small graphs, and the memory of a step
    two_passes   two passes of a joined step that are right alone and wrong together
    whole_steps  a graph's lines, memory, traffic, timed steps, late reads; a grader
"""
