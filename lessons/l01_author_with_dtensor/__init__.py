"""What "Author with DTensor" alone uses.

    pictures        what a change of placements sends
    placement_lab   mesh axes on the dimensions of two factors; its grader
    plans           what a stack of linears sends under a plan; figures of answers
    redistribution  the collectives of a change of placements
    slices          which rank holds which slice
"""
