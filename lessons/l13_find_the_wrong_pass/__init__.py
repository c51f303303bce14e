"""What "Find the wrong pass" alone uses.

    examine       a pipeline on a fake rank, and a table of what its passes did and said
    gather_order  the gathers of a forward as boxes, each with its module
    suspects      a healthy pipeline, and four with a planted fault each; a grader
    verdict_rows  each list of passes as a row, green where a verdict is PASS
"""
