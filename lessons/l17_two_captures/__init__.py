"""What "Two captures" alone uses.

    compare       `compare_captures`: one recipe from both captures, and what each trains
    differences   the graphs of two captures, node by node
    forwards      forwards that a capture takes, freezes or refuses
    kept          what a step keeps for its backward, from both captures
    two_captures  wrong modules
"""
