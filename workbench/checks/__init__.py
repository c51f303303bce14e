"""The verdicts: what a pass changed, what it had to change, and what it had to keep.

    bisect         the first pass and node that break their contract
    captures       two captures of one step, node by node
    collectives    bytes conserved, one order on all ranks
    effect         whether the pass had its intended effect
    joining        the join of forward, backward and optimizer
    lineage        a node through every pass
    lint           whether the next stage can run the graph
    matching       match nodes of two runs by value
    metadata       whether meta['val'] fits the operator's result
    numerics       whether the values stay within the contract
    order          whether compute still hides the collectives at later stages
    recomputation  what the backward of a traced step computes again
    record         PassRecord: what one pass did, and the table of checks
    values         the value of every node of a run
    verdicts       Verdict and its outcomes
"""
