"""What "Author with DTensor" alone uses.

    placement_lab  mesh axes on the dimensions of two factors; its grader
"""
