"""What "Split forward and backward" alone uses.

    partitioner  save a tensor, or compute it again; its grader
    pictures     bytes saved against work computed again
"""
