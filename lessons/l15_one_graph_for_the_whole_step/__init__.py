"""What "One graph for the whole step" alone uses.

    pictures     small graphs as rows of letters
    two_passes   two passes of a joined step that are right alone and wrong together
    whole_steps  a graph's lines, traffic, timed steps, late reads; graders
"""
