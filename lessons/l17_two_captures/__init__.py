"""What "Two captures" alone uses.

    two_captures  wrong modules, readers of saved tensors, refusals; a grader
"""
