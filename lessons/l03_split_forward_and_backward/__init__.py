"""What "Split forward and backward" alone uses.

    budgets      memory budgets as they ran on GPUs
    partitioner  save a tensor, or compute it again; its grader
    pictures     bytes saved against work computed again
"""
