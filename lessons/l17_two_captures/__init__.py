"""What "Two captures" alone uses.

    compare       `compare_captures`: one recipe from both captures, and what each trains
    differences   the graphs of two captures, node by node
    two_captures  wrong modules, readers of saved tensors, refusals; a grader
"""
