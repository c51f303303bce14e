"""What "Author with DTensor" alone uses.

    pictures        what a change of placements sends; what a rank holds of each parameter
    placement_lab   mesh axes on the dimensions of two factors; its grader
    redistribution  the collectives of a change of placements
    slices          which rank holds which slice
"""
