"""What "Split forward and backward" alone uses.

    partitioner  save a tensor, or compute it again; its grader
    pictures     bytes saved against work repeated
    prices       what a cut keeps, and what its backward repeats
"""
